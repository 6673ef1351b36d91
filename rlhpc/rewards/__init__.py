"""Rewards, and the processes that compute them.

    response ─> reward_workers.py ─> pool.py ─> worker.py (a process each) ─> a reward function
                               │            └─> code.py ─> sandbox.py: guard, namespaces, the program under limits
                               └ watches the time of each call, replaces a worker that hangs or dies

In: responses as they finish; out: scores. Workers are started afresh, not forked, import no torch, ignore the signals
that ask ranks to stop, and end with the rank. ``reward_workers`` is for the trainer; all else is free of torch, and
nothing is imported here, because the processes import this package too.
"""
