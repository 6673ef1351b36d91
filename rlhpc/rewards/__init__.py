"""Reward functions, and the processes that call them.

    response ─> reward_workers.py ─> pool.py ─> worker.py (one per process) ─> a reward function
                               │            └─> code.py ─> sandbox.py: guard, first process, the program under limits
                               │                 └─> statements of tests in a second sandbox
                               └ limits the time of each call, replaces a worker that hangs or dies

In: responses as they finish; out: scores. Workers are spawned, not forked; they import no torch, ignore the signals
that ask ranks to stop, and end with the rank. ``reward_workers`` and ``failures`` run in the trainer. The worker
processes import this package too, so it imports nothing itself, and every other module is free of torch.
"""
