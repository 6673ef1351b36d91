"""``rlhpc run``: checks the config, prepares its inputs, checks them, starts the ranks."""

from __future__ import annotations

import sys
import time

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults
from rlhpc.core.folder import RunFolder
from rlhpc.core.shown import show
from rlhpc.core.text import duration
from rlhpc.launch.machine import check_packages, check_profile_tools, check_resources, with_local_ranks
from rlhpc.launch.runs.preflight import check_architectures
from rlhpc.launch.runs.prepare import run_prepare
from rlhpc.launch.supervise.local import check_folder, run_local
from rlhpc.launch.worker.main import TRAINER
from rlhpc.launch.worker.node_gpu import check_gpu_software
from rlhpc.plan.checks.run import check_config


def run_here(config: RunConfig, *, resume: bool = False, entry: str = TRAINER) -> int:
    """Runs ``config`` on this machine, ``entry`` on every rank; returns the exit code. Shows what it starts.

    Raises UserError for errors that the user can fix.
    """
    started = time.monotonic()
    config, ranks = with_local_ranks(config)
    folder = RunFolder(config.folder)
    faults, summary = Faults(), []
    with faults.collect():
        check_resources(config)
    with faults.collect():
        check_profile_tools(config)
    with faults.collect():
        check_folder(folder, resume=resume)
    with faults.collect():
        summary = check_config(config, prepared=config.prepare is None)
    faults.raise_all()
    if entry == TRAINER:
        check_packages(config)
        check_gpu_software()
        if config.prepare is None:
            summary += _proved(config)
    show(f"starting {config.name}\n  folder  {folder.path}")
    if ranks is not None:
        show(f"  ranks   {ranks}")
    if config.prepare is not None:
        show(f"  prepare {config.prepare.function}")
        if not run_prepare(config.prepare):
            show(f"rlhpc: prepare.function: {config.prepare.function} failed, see above", file=sys.stderr)
            return 1
        summary = check_config(config)
        summary += _proved(config) if entry == TRAINER else []
    for topic, text in summary:
        show(f"  {topic:<8}{text}")
    code = run_local(config, folder, resume=resume, entry=entry)
    if not code:
        show(f"rlhpc: finished in {duration(time.monotonic() - started)}: {folder.path}")
    return code


def _proved(config: RunConfig) -> list[tuple[str, str]]:
    """Warnings of models that are not proved here."""
    return [("warning", text) for text in check_architectures([config])]
