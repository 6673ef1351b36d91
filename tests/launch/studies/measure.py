"""Figures of studies, over many repetitions: python -m tests.launch.studies.measure

Suggestions that cannot work, where half of the space cannot, by where the best settings are; advances killed at random
moments; and the time of `rlhpc study status` with 200 trials.
"""

from __future__ import annotations

import functools
import math
import random
import resource
import signal
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
from rlhpc.core import attempts
from rlhpc.core.errors import UserError
from rlhpc.launch.studies import advance as module
from rlhpc.launch.studies.study_folder import StudyFolder, base_of, create
from rlhpc.launch.studies.trials_table import read_table
from tests.helpers.runs import ROOT
from tests.helpers.waiting import until
from tests.launch.studies.trial_stand_in import RATE, begin, finish, study_of

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
    refused = [row.state == "infeasible" for row in read_table(study).rows]
    assert len(trials.starts) == 60 == len(refused) - sum(refused)
    return sum(refused[:60]) / 60


def quick_configuration(
    folder: StudyFolder, study: object, number: int, values: dict[str, Any], segment: int
) -> RunConfig:
    """``space.configuration`` of the stand-in's study, without reading the base each time."""
    base = _base()
    optimizer = base.actor.optimizer.model_copy(update={"learning_rate": values[RATE]})
    actor = base.actor.model_copy(update={"optimizer": optimizer})
    train = base.train.model_copy(update={"minibatches": values["train.minibatches"]})
    run = {"name": f"search-{number}", "run_dir": folder.trial(number).path}
    return base.model_copy(update={**run, "actor": actor, "train": train})


def check_kills(folder: Path, kills: int) -> int:
    """Kills advances at random moments and lets the last one end the study: no trial is lost or run twice. Returns the
    number of trials."""
    study, trials = begin(folder, budget={"trials": 5000, "at_once": 2})
    command = [sys.executable, "-m", "tests.launch.studies.trial_stand_in", str(study.path)]
    moments = random.Random(0)
    for _ in range(kills):
        before = len(trials.starts)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        until(lambda count=before: len(trials.starts) > count, "a start", seconds=60)
        time.sleep(moments.uniform(0.0, 0.5))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    count = len(read_table(study).rows) + 5
    smaller = study_of(folder, budget={"trials": count, "at_once": 2})
    create(smaller, base_of(smaller), local=False)
    finish(study, trials)
    found = read_table(study)
    assert count > kills
    assert [row.state for row in found.rows] == ["complete"] * count
    # A kill between a start's line in the log and its folder repeats the line.
    assert set(trials.starts) == {f"search-{number}" for number in range(count)}
    assert all(len(attempts.folders(study.trial(number))) == 1 for number in range(count))
    return count


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
        print(f"20 advances killed: {check_kills(folder / 'kills', 20)} trials, each complete and run once")
        wall, used = status_seconds(folder / "status")
    print(f"status of 200 trials: {wall:.2f} s, {used:.2f} s of a core")


if __name__ == "__main__":
    main()
