"""Population-based training: the worst trials go on from checkpoints of the best, with other values, in spite of
interruptions."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.config.study import PopulationSection
from rlhpc.core.folder import RunFolder
from rlhpc.launch.studies.journal import open_study
from rlhpc.launch.studies.segments import adopt_checkpoint, changed, copies_of, sources
from rlhpc.launch.studies.study_folder import StudyFolder
from rlhpc.launch.studies.trials_table import best_configuration, read_table
from tests.launch.studies.trial_stand_in import (
    RATE,
    SPACE,
    StandIn,
    advance,
    begin,
    finish,
    finish_interrupted,
    score,
    study_of,
)

SEGMENTS = {"steps": [2, 4, 6], "population": {"replace": 0.25, "factor": 2.0}}
_STEP = "step-{:08d}"


def checkpoint(run: RunFolder, step: int, text: str) -> Path:
    folder = run.checkpoints / _STEP.format(step)
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "weights").write_text(text)
    return folder


class Population(StandIn):
    """Each segment leaves a checkpoint that names the trials whose checkpoints it came from."""

    def start(self, config: RunConfig, *, again: bool) -> None:
        super().start(config, again=again)
        run, length = RunFolder(config.folder), SEGMENTS["steps"][0]
        assert isinstance(length, int)
        former = run.checkpoints / _STEP.format(config.train.steps - length) / "actor" / "weights"
        own = f"{config.actor.optimizer.learning_rate:.3g}"
        checkpoint(run, config.train.steps, f"{former.read_text()} {own}" if again else own)


def begun(folder: Path) -> tuple[StudyFolder, Population]:
    known = {"sampler": {"name": "RandomSampler"}, "budget": {"trials": 4, "at_once": 4}}
    study, trials = begin(folder, segments=SEGMENTS, space={RATE: SPACE[RATE]}, **known)
    return study, Population(trials.log, curve=lambda config, step: score(config))


def histories(folder: StudyFolder) -> list[list[str]]:
    """Of each trial the learning rates that its weights were trained with."""
    weights = [folder.trial(number).checkpoints / _STEP.format(6) / "actor" / "weights" for number in range(4)]
    return [file.read_text().split() for file in weights]


def check(folder: StudyFolder, trials: StandIn) -> list[list[str]]:
    """All trials are complete; copies go on with their source's weights and another rate."""
    found = read_table(folder)
    assert {row.state for row in found.rows} == {"complete"}
    assert sorted(trials.starts) == sorted(
        f"search-{number}{' again' * (step > 2)} to {step}" for number in range(4) for step in (2, 4, 6)
    )
    known = histories(folder)
    firsts = [rates[0] for rates in known]
    copied = {row.number for row in found.rows if row.why}
    assert all(row.why.startswith("a copy of trial ") for row in found.rows if row.number in copied)
    assert len(set(firsts)) == 4 - len(copied)  # weights of the worst are gone
    for row, rates in zip(found.rows, known, strict=True):
        assert rates[-1] == f"{row.values[RATE]:.3g}"
        assert (len(set(rates)) > 1) == (row.number in copied)
        ratios = [float(after) / float(before) for before, after in itertools.pairwise(rates)]
        assert all(any(abs(ratio - each) < 0.02 * each for each in (0.5, 1.0, 2.0)) for ratio in ratios)
    with folder.locked():
        trials_found = open_study(folder, found.study).get_trials()
    for trial in trials_found:
        segments = [segment for segment, _ in copies_of(trial)]
        assert len(segments) == len(set(segments))
    return known


def test_the_worst_go_on_as_copies_of_the_best(tmp_path: Path) -> None:
    folder, trials = begun(tmp_path)
    finish(folder, trials)
    check(folder, trials)
    found = read_table(folder)
    assert found.best is not None
    assert f"learning_rate: {found.rows[found.best].values[RATE]!r}" in best_configuration(folder)


def test_interruptions_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each copy and each start, and between each two notes."""
    plain, trials = begun(tmp_path / "plain")
    finish(plain, trials)
    folder, others = begun(tmp_path / "interrupted")
    seen = set[str]()

    def at_first(name: str) -> None:
        if name not in seen:
            seen.add(name)
            raise KeyboardInterrupt

    def interrupted(target: RunFolder, source: RunFolder) -> None:
        at_first(f"{target.path.name} {source.path.name}")
        adopt_checkpoint(target, source)

    assert advance(folder, others) == 4
    monkeypatch.setattr("rlhpc.launch.studies.advance.show", at_first)
    monkeypatch.setattr("rlhpc.launch.studies.segments.adopt_checkpoint", interrupted)
    finish_interrupted(folder, others)
    assert any("copy of trial" in name for name in seen)
    assert any(name.startswith("trial-000") for name in seen)
    assert check(folder, others) == histories(plain)


def test_the_worst_and_the_best_are_paired() -> None:
    values = {0: 5.0, 1: 1.0, 2: 3.0, 3: 2.0}
    assert sources(values, PopulationSection(replace=0.5), "maximize") == {1: 0, 3: 2}
    assert sources(values, PopulationSection(replace=0.25), "minimize") == {0: 1}
    assert sources({0: 1.0, 1: 1.0, 2: 1.0}, PopulationSection(replace=0.5), "maximize") == {2: 0}
    assert sources({4: 1.0}, PopulationSection(), "maximize") == {}


def test_a_copy_s_values_stay_in_their_ranges_and_conditions(tmp_path: Path) -> None:
    coefficient = "algorithm.kl.coefficient"
    space = {
        RATE: {"low": 1e-4, "high": 2e-4, "log": True},
        "train.minibatches": {"choices": [1, 2, 4]},
        "rollout.samples_per_prompt": {"low": 4, "high": 16, "step": 4},
        coefficient: {"low": 0.0, "high": 0.1, "step": 0.05, "when": {"train.minibatches": [2, 4]}},
    }
    small = {"steps": [2, 4], "population": {"factor": 1.01}}
    whole = study_of(tmp_path, space={"seed": {"low": 1, "high": 9}}, segments=small)
    assert {changed(whole, {"seed": 3}, random.Random(seed))["seed"] for seed in range(20)} == {2, 4}
    study = study_of(tmp_path, space=space, segments=SEGMENTS)
    values = {RATE: 1.5e-4, "train.minibatches": 1, "rollout.samples_per_prompt": 8}
    found = [changed(study, values, random.Random(seed)) for seed in range(50)]
    assert {each[RATE] for each in found} == {1e-4, 2e-4}
    assert {each["train.minibatches"] for each in found} == {1, 2}
    assert {each["rollout.samples_per_prompt"] for each in found} == {4, 16}
    assert all((coefficient in each) == (each["train.minibatches"] == 2) for each in found)
    assert {each[coefficient] for each in found if coefficient in each} <= {0.0, 0.05}


def test_a_checkpoint_is_adopted_whole_and_again(tmp_path: Path) -> None:
    """After a kill at any moment: a folder half made, the old one gone."""
    source, target = RunFolder(tmp_path / "source"), RunFolder(tmp_path / "target")
    given, own = checkpoint(source, 4, "theirs"), checkpoint(target, 4, "ours")
    (target.checkpoints / f".copy-{own.name}").mkdir()
    own.rename(target.checkpoints / f".replaced-{own.name}")
    for _ in range(2):
        adopt_checkpoint(target, source)
        assert (own / "actor" / "weights").read_text() == "theirs"
        assert [path.name for path in target.checkpoints.iterdir()] == [own.name]
    assert (given / "actor" / "weights").read_text() == "theirs"
