"""Trackers: TensorBoard, MLflow, Weights & Biases, and users' own.

    metrics.jsonl ─> steps.py ─> delivery.py (thread per tracker) ─> tensorboard.py | mlflow_runs.py | wandb_runs.py

One process beside the ranks feeds them; ``python -m rlhpc.observe.trackers RUN`` sends afterwards what they lack. Both
start where a tracker's last step ends. No rank imports a tracker, and nothing here loads torch.
"""
