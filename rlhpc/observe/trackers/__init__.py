"""Trackers: TensorBoard, MLflow, Weights & Biases, and users' own.

    metrics.jsonl ─> protocol.py ─> delivery.py (thread per tracker) ─> event_files.py | mlflow_runs.py | wandb_runs.py

One process beside the ranks, ``python -m rlhpc.observe.trackers RUN``, feeds them; ``rlhpc sync`` does the same
afterwards. Both start where a tracker's last step ends, which the tracker itself is asked for. No rank imports a
tracker, and nothing here loads torch.
"""
