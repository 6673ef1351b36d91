"""Predicted memory and time of a run on a given GPU.

    hardware.py: what the machine can ──┐
    workload.py: how much there is to do ├─> rollout_time.py, train_time.py ─> step_time.py ─> run_time.py
    roofline.py: seconds by cause ──────┘
    model_memory.py: weights, gradients, optimizer, activations of each model ─> memory.py: phase by phase

In: a config, a model shape, a layout, a GPU. Out: seconds by what they are spent on, bytes by phase. ``rlhpc plan``
searches over layouts with them (``plan/search.py``) and turns them round, from seconds to the machine's efficiency
(``plan/calibrate.py``).
"""
