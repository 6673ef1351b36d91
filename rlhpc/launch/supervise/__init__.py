"""Process that starts the ranks and watches them: begin, watch, diagnose, decide.

    srun.py ─> ranks ─> exit records, heartbeats ─> hang_watch.py, hang_analysis.py ─> diagnosis.py ─> policy.py
                 └ meet at job_store.py

``supervisor.py`` does it in a Slurm job, ``local.py`` on this machine. Diagnosis and policy are pure.
"""
