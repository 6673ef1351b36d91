"""Figures of studies, over many repetitions: python -m tests.launch.studies.measure

Suggestions that cannot work, where half of the space cannot, by where the best settings are; advances and trials killed
at random moments; and the time of `rlhpc study status` with 200 trials.
"""

from __future__ import annotations

import functools
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.launch.studies import advance as module
from rlhpc.launch.studies.study_folder import StudyFolder
from rlhpc.launch.studies.trials_table import read_table
from tests.helpers.runs import ROOT
from tests.launch.studies.trial_processes import check_kills
from tests.launch.studies.trial_stand_in import RATE, begin, finish

BORDER = 3e-4  # the middle of the range in logarithms: larger rates cannot work
_base = functools.cache(lambda: load_config(ROOT / "configs" / "demo.yaml"))


def infeasible_share(folder: Path, seed: int, best: float = 1e-4) -> float:
    """Share of the first 60 suggestions that cannot work. ``best``: the best learning rate."""

    def refuse(config: RunConfig) -> None:
        if config.actor.optimizer.learning_rate > BORDER:
            raise UserError("does not fit", where="planning")

    study, trials = begin(folder, seed=seed, budget={"trials": 60, "at_once": 1})
    trials.refuse = refuse
    trials.outcome = lambda config: -abs(math.log10(config.actor.optimizer.learning_rate / best))
    finish(study, trials)
    refused = [row.state == "infeasible" for row in read_table(study).trials]
    assert len(trials.starts) == 60 == len(refused) - sum(refused)
    return sum(refused[:60]) / 60


def quick_configuration(folder: StudyFolder, study: object, number: int, values: dict[str, Any]) -> RunConfig:
    """``space.configuration`` of the stand-in's study, without reading the base each time."""
    base = _base()
    optimizer = base.actor.optimizer.model_copy(update={"learning_rate": values[RATE]})
    actor = base.actor.model_copy(update={"optimizer": optimizer})
    train = base.train.model_copy(update={"minibatches": values["train.minibatches"]})
    run = {"name": f"search-{number}", "run_dir": folder.trial(number).path}
    return base.model_copy(update={**run, "actor": actor, "train": train})


def status_seconds(folder: Path) -> tuple[float, float]:
    """Wall and processor seconds of ``rlhpc study status`` with 200 finished trials, the least of five."""
    study, trials = begin(folder, budget={"trials": 200, "at_once": 50})
    finish(study, trials)
    command = [sys.executable, "-m", "rlhpc.cli.main", "study", "status", str(study.path)]
    times = []
    for _ in range(5):
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append((time.monotonic() - began, used))
    return min(times)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="rlhpc-studies-"))
    quick = mock.patch.object(module, "configuration", quick_configuration)
    with quick, mock.patch.object(module.Advance, "_check_base"), mock.patch.object(module, "show"):
        for best in (1e-4, 1e-3):
            shares = [infeasible_share(folder / f"{best}-{seed}", seed, best) for seed in range(10)]
            print(
                f"best at {best:g}, border at {BORDER:g}: {statistics.mean(shares):.3f} of 60 suggestions cannot work"
            )
    with mock.patch.object(module, "show"):
        table, killed = check_kills(folder / "kills", 20)
        counts = f"{killed.count('advance')} advances and {killed.count('trial')} trials killed"
        print(f"{counts}: {table.counts_words}, each once")
        wall, used = status_seconds(folder / "status")
    print(f"status of 200 trials: {wall:.2f} s, {used:.2f} s of a core")


if __name__ == "__main__":
    main()
