"""Predicted memory and time of a run on a given GPU.

    hardware.py: figures of the machine ─┐
    workload.py: size of a step ─────────┼─> rollout_time.py, train_time.py ─> step_time.py ─> run_time.py
    roofline.py: seconds by bottleneck ──┘
    model_memory.py: weights, gradients, optimizer, activations of each model ─> memory.py: phase by phase

In: a config, a model shape, a layout, a GPU. Out: seconds by bottleneck, bytes by phase. ``rlhpc plan`` searches over
layouts with them (``plan/search.py``), and fits the machine's efficiency to measured seconds (``plan/calibrate.py``).
"""
