"""Process that starts the ranks and watches them: begin, watch, diagnose, decide.

    srun.py ─> ranks ─> exit records, heartbeats ─> hang_watch.py, hang_analysis.py ─> diagnosis.py ─> policy.py
                 └ meet at job_store.py

``supervisor.py`` does it in an allocation: a Slurm job (``allocation.py``), or this machine (``local.py``). Diagnosis
and policy are pure.
"""
