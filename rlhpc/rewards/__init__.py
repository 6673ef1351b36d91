"""Layer 4: rewards, and the processes that compute them.

Nothing is imported here: the processes import this package too, and must not load torch. ``judge`` is for the trainer,
all else is free of torch.
"""
