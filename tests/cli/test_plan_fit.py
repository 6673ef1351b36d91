"""A plan that does not fit is marked, shows what it lacks, and ends with an exit code of its own."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rlhpc.core.errors import EXIT_DOES_NOT_FIT, DoesNotFitError
from tests.cli.test_main import rlhpc
from tests.helpers.commands import invoke

ROOT = Path(__file__).parents[2]
READY = ROOT / "configs" / "ready"
NODE, SEVENTY = str(READY / "qwen2-7b-8gpus.yaml"), str(READY / "qwen2.5-72b-96gpus.yaml")
AXES = {"ranks", "tp", "cp", "dp", "pp", "etp", "ep", "edp", "vpp", "first_stage_layers", "last_stage_layers"}


def plan(*arguments: str) -> Result:
    return invoke("plan", *arguments)


def document(*arguments: str, code: int = 0) -> Any:
    done = plan(*arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        ((), []),
        (("--gpu", "a100-40", "actor.memory.recompute=none", "actor.parallel.pp=1"), ["forward and backward"]),
        (("rollout.gpu_memory_utilization=0.09",), ["KV cache"]),
        (("rollout.kv_cache_gib=0.001",), ["KV cache"]),
        (("slurm.memory=100G",), ["CPU memory"]),
    ],
)
def test_a_plan_that_lacks_memory_of_any_kind_ends_with_3(words: tuple[str, ...], lacks: list[str]) -> None:
    found = document("run", NODE, *words, code=3 if lacks else 0)
    assert found["fits"] == (not lacks)
    named = [text.partition(":")[0] for text in found["shortages"]]
    assert set(lacks) <= set(named)
    assert bool(named) == bool(lacks)


def test_a_cache_that_holds_no_sequence_has_a_remedy() -> None:
    done = plan("run", SEVENTY, "rollout.tp=2")
    assert done.exit_code == 3
    assert done.output.splitlines()[-1] == (
        "DOES NOT FIT: rollout.gpu_memory_utilization: KV cache: 0 of 5,120 tokens of a prompt with its response; "
        "set it to 0.88 or set rollout.tp to 4"
    )


def test_a_plan_that_fits_has_no_remedy() -> None:
    done = plan("run", NODE)
    assert done.exit_code == 0
    assert not re.search("DOES NOT FIT|fits with", done.output)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("qwen2-7b-8gpus", ["slurm.memory=100G"]),
        ("qwen2.5-7b-1node", ["--gpu", "a100-40"]),
        ("qwen2.5-72b-96gpus", ["rollout.tp=1"]),
        ("qwen2.5-7b-1node", ["rollout.gpu_memory_utilization=0.95"]),
    ],
)
def test_a_remedy_fits_once_its_words_are_appended(config: str, words: list[str]) -> None:
    file = str(READY / f"{config}.yaml")
    done = plan("run", file, *words)
    assert done.exit_code == 3
    assert "DOES NOT FIT" in done.output
    (remedy,) = re.findall(r"^  fits with  (\S.*?)  \(", done.output, re.MULTILINE)
    assert plan("run", file, *words, *shlex.split(remedy)).exit_code == 0, remedy


@pytest.mark.heavy
def test_results_of_a_search_fit_once_their_line_is_appended() -> None:
    file = str(READY / "qwen2.5-7b-1node.yaml")
    lines = plan("search", file, "--gpu", "a100-40").output.splitlines()
    results = [line.removeprefix("# ") for line in lines if re.match(r"# [\w.]+=", line)]
    assert len(results) == 7
    for result in results:
        assert plan("run", file, "--gpu", "a100-40", *shlex.split(result)).exit_code == 0, result


def test_without_a_gpu_nothing_is_known_to_be_too_large(tmp_path: Path) -> None:
    assert plan("run", NODE, "planning.gpu=null").exit_code == 0


@pytest.mark.heavy
def test_exit_codes_of_the_command_itself() -> None:
    """Of the program, not of its functions: a plan that does not fit, a search that finds nothing, wrong input."""
    assert rlhpc("plan", "run", NODE, "slurm.memory=100G").returncode == EXIT_DOES_NOT_FIT == 3
    done = rlhpc("plan", "search", NODE, "slurm.memory=1G")
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert " layouts fits into 79.6 GiB and 1 GiB of CPU memory per node (slurm.memory)" in done.stderr
    assert rlhpc("plan", "run", NODE, "actor.parallel.tp=3").returncode == 2


def test_the_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "scripting.md").read_text()
    assert "| 3 | `rlhpc plan`: the run does not fit" in page


@pytest.mark.heavy
def test_numbers_of_gpus_on_which_nothing_fits_end_with_3() -> None:
    words = ["search", SEVENTY, "--gpus", "8,96"]
    done = plan(*words, "slurm.memory=340G")
    assert done.exit_code == 0, "it fits on some"
    _, small, large = done.output.splitlines()
    assert small.split()[1:6] == ["-"] * 5
    assert " layouts fits into 79.6 GiB and 340 GiB of CPU memory per node (slurm.memory)" in small
    assert "  100%  " in large, "speed is relative to the first that fits"
    assert [one["fits"] for one in document(*words, "slurm.memory=340G")] == [False, True]
    assert plan(*words, "slurm.memory=1G").exit_code == EXIT_DOES_NOT_FIT


@pytest.mark.heavy
def test_a_search_marks_what_cannot_run_and_shows_cpu_memory() -> None:
    config = str(READY / "qwen2.5-7b-1node.yaml")
    lines = plan("search", config, "--gpu", "a100-40", "slurm.memory=2000G").output.splitlines()
    assert lines[1].endswith(", tp 2 x dp 4, DOES NOT FIT (forward and backward: 48.1 of 40.0 GiB)")
    (first,) = [line for line in lines if line.startswith("# 1: ")]
    assert " of 40, " in first
    assert " GiB of CPU memory a node of 2,000, tp " in first
    assert not [line for line in lines if line.startswith("# DOES NOT FIT")]


def test_a_search_proposes_no_engine_without_room_for_a_sequence() -> None:
    found = document("search", NODE, "rollout.gpu_memory_utilization=0.1")
    assert all(best["fits"] and best["rollout"]["tp"] > 2 for best in found if best["placement"] == "colocated")
    error = plan("search", NODE, "rollout.gpu_memory_utilization=0.01", "reshard.share_weights=true").exception
    assert isinstance(error, DoesNotFitError)
    assert "raise it" not in error.remedy


@pytest.mark.heavy
def test_layouts_in_json_are_axes() -> None:
    run = document("run", SEVENTY)
    assert set(run["layout"]) == AXES
    assert (run["layout"]["tp"], run["layout"]["pp"], run["layout"]["first_stage_layers"]) == (8, 6, 14)
    assert run["engines"] == {"count": 12, "tp": 8}
    for best in document("search", NODE):
        asked = {key: size for key, size in best["actor"]["parallel"].items() if size is not None}
        assert set(best["layout"]) == AXES
        assert asked.items() <= best["layout"].items()
