"""A rank's program: join the others, build, run."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.core import env
from rlhpc.core.folder import RunFolder
from rlhpc.core.rank import RankInfo


def run_rank(run_dir: str, resume: bool) -> None:
    """Run this rank of the run in ``run_dir``, whose resolved config the launcher has written there.

    ``resume`` continues from the newest checkpoint, or from the start when there is none yet.
    """
    import torch

    from rlhpc.observe.report import write_report
    from rlhpc.parallel.groups import join, leave
    from rlhpc.trainer.build import build
    from rlhpc.trainer.loop import Loop

    folder, info = RunFolder(Path(run_dir)), RankInfo.from_environ()
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format=f"%(asctime)s rank {info.rank} %(name)s: %(message)s",
        force=True,
    )
    torch.set_num_threads(int(os.environ.get(env.OMP_NUM_THREADS, "1")))
    config = load_config(folder.config)
    join(info)
    run = build(config, folder, info)
    Loop(run, resume).run()
    if info.rank == 0:
        write_report(folder)
    if run.engine is not None:
        run.engine.shutdown()
    leave()
