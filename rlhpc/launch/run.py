"""``rlhpc run``: check, prepare, check what was prepared, start."""

from __future__ import annotations

import sys

from rlhpc.config.schema import RunConfig
from rlhpc.core.folder import RunFolder
from rlhpc.launch.local import check_folder, run_local
from rlhpc.launch.machine import check_resources
from rlhpc.launch.prepare import run_prepare
from rlhpc.plan.check import check_config


def run_here(config: RunConfig, resume: bool = False) -> int:
    """Run ``config`` on this machine; return the exit code. Raises UserError for all that the user can mend."""
    folder = RunFolder(config.folder)
    check_resources(config.resources)
    check_folder(folder, resume)
    check_config(config, prepared=config.prepare is None)
    if config.prepare is not None:
        if not run_prepare(config.prepare):
            print(f"rlhpc: prepare.function: {config.prepare.function} failed, see above", file=sys.stderr)
            return 1
        check_config(config)
    return run_local(config, folder, resume)
