"""Mutated inputs are refused or accepted as they should be, and the tool notices where they are not."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cases import long_but
from tools.mutants import schema
from tools.mutants.__main__ import KINDS, drawn
from tools.mutants.forked import Outcome
from tools.mutants.inputs import Inputs
from tools.mutants.one_case import ALL, Case
from tools.mutants.summary import judged, table

ROOT = Path(__file__).parents[2]


@pytest.mark.workers
@pytest.mark.parametrize("count", long_but((100,), (100, 500)))
def test_cases_show_no_fault(count):
    command = [sys.executable, "-m", "tools.mutants", "--cases", str(count), "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-3000:]}"
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| all |")]
    cases, refused, accepted, *faults = [int(cell) for cell in row.split("|")[2:11]]
    assert (cases, sum(faults)) == (count, 0)
    assert refused > count // 2
    assert accepted > count // 10
    assert refused + accepted == count


def test_a_case_depends_on_its_seed_and_number_alone(tmp_path):
    inputs = Inputs(tmp_path / "inputs")

    def made(folder: Path, number: int) -> tuple[object, ...]:
        case = drawn(3, number, folder)
        inputs.copy(case.folder, case.family)
        KINDS[case.kind][0](case)
        files = [file for file in sorted(case.folder.rglob("*")) if file.is_file() and file.stat().st_size < 10**6]
        return case.kind, case.what, case.names, case.words, case.wrong, [file.read_bytes() for file in files]

    for number in range(12):
        folders = (tmp_path / name / str(number) for name in ("one", "other"))
        one, other = (made(folder, number) for folder in folders)
        assert one == other


def _case(tmp_path: Path, command: str = "check", *, wrong: bool = True) -> Case:
    case = Case(7, tmp_path, "qwen2", command, random.Random(0), "value in the file")
    case.changed("train.steps = -1", "train.steps", wrong_for=ALL if wrong else frozenset())
    return case


@pytest.mark.parametrize(
    ("outcome", "faults"),
    [
        (Outcome(2, "rlhpc: train.steps: -1 is not allowed", 0.1, 10**8), ()),
        (Outcome(2, "rlhpc: train: is missing", 0.1, 10**8), ("not named",)),
        (Outcome(0, "layout", 0.1, 10**8), ("wrongly accepted",)),
        (Outcome(3, "does not fit", 0.1, 10**8), ("wrongly accepted",)),
        (Outcome(1, "Traceback (most recent call last)\nValueError: train.steps", 0.1, 10**8), ("traceback",)),
        (Outcome(-9, "train.steps", 0.1, 10**8), ("traceback",)),
        (Outcome(2, "train.steps", 5.1, 1.1e9), ("over 5 s of CPU time", "over 1 GB")),
    ],
)
def test_what_is_wrong_with_an_outcome(tmp_path, outcome, faults):
    result = judged(_case(tmp_path), outcome)
    assert result.faults == faults
    listed = [line for line in table([result]) if line.startswith("| 7 |")]
    assert len(listed) == bool(faults)


def test_a_search_may_take_longer_and_a_mere_change_be_accepted(tmp_path):
    assert judged(_case(tmp_path, "search", wrong=False), Outcome(0, "", 60.0, 10**8)).faults == ()


@pytest.mark.parametrize(
    ("key", "value", "fits"),
    [
        ("train.steps", 3, "yes"),
        ("train.steps", -1, "no"),
        ("train.steps", True, "no"),
        ("train.steps", "3", "no"),
        ("train.prompts_per_step", 10**18, "no"),
        ("name", "..", "no"),
        ("name", "n" * 129, "no"),
        ("model.path", "a\0b", "no"),
        ("algorithm.kl.estimator", "k4", "no"),
        ("slurm.nodes", [1, 2], "unsure"),
        ("sft", None, "yes"),
        ("actor.optimizer.learning_rate", float("nan"), "no"),
    ],
)
def test_which_values_fit_the_schema(key, value, fits):
    nodes = dict(schema.all_keys())
    assert schema.fit(nodes[key], value) == fits
