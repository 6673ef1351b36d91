"""Real parts through the real driver, at tiny sizes on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.acceptance.driver import PARTS, Options, accept
from bench.acceptance.results import STATE, Part, Results, read_results
from tests.rollout.engines import cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, cpu_only]


def start(folder: Path, parts: Sequence[Part], **options: object) -> tuple[int, Results, str]:
    """One invocation; its exit code, state and page."""
    code = accept(folder, parts, Options(size="tiny", **options))  # type: ignore[arg-type]
    results = read_results(folder / STATE)
    return code, results, (folder / results.page).read_text()


def planted(name: str) -> Part:
    return Part(name, name, "first", 8.0, f"tests.bench.acceptance.planted:{name}", needs_gpu=False)


def problems(page: str) -> str:
    return page.partition("## Not run")[0]


def test_the_installation_is_reported(tmp_path: Path) -> None:
    code, results, page = start(tmp_path, PARTS, names=("install",))
    assert code == 0
    figures = {figure.name: figure for figure in results.parts["install"].figures}
    assert figures["vLLM's model runner"].value in ("V1", "V2")
    assert "CPUAttention" in str(figures["vLLM's attention"].value)
    assert figures["grouped product vs. single products"].met
    assert figures["import vllm"].note.startswith("version 0.")
    assert "| install | CUDA | needs a GPU |" in page


@pytest.mark.long
def test_everything_passes_in_two_starts(tmp_path: Path) -> None:
    """The first invocation has no time for the last parts, the second runs them, and the third runs none."""
    first = PARTS[: len(PARTS) // 2]
    code, results, _ = start(tmp_path, first)
    assert code == 0
    begun = {name: record.started for name, record in results.parts.items()}
    code, results, page = start(tmp_path, PARTS)
    assert code == 0, page
    assert {name: record.status for name, record in results.parts.items()} == {
        part.name: "skipped" if part.needs_gpu else "passed" for part in PARTS
    }
    assert problems(page).endswith("## Failures and missed goals\n\nNone.\n\n")
    for part in PARTS:
        assert f"## {part.name}: {part.title}" in page
        if part.needs_gpu:
            assert f"| {part.name} | all | needs a GPU |" in page
        elif part.name in begun:
            assert results.parts[part.name].started == begun[part.name]
    files = list(tmp_path.iterdir())
    assert len(files) <= 8
    assert all(file.is_file() and file.stat().st_size < 16 << 20 for file in files)
    assert start(tmp_path, PARTS)[1].parts == results.parts


@pytest.mark.long
def test_planted_faults_show_on_the_page(tmp_path: Path) -> None:
    """A wrong weight in the engine and a slow weight sync miss goals; a crash fails its part."""
    code, results, page = start(tmp_path, [planted("wrong_weight"), planted("slow_sync"), planted("crash")])
    assert code == 1
    assert {name: record.status for name, record in results.parts.items()} == {
        "wrong_weight": "passed",
        "slow_sync": "passed",
        "crash": "failed",
    }
    found = problems(page)
    assert "**wrong_weight: goal missed.** dense: " in found
    assert "layers.1.self_attn.o_proj" in found
    assert "**slow_sync: goal missed.** tiny: write: 2" in found
    assert "**crash: failed.** killed by SIGKILL" in found
    assert "| import torch |" in page, "measured before the crash"


@pytest.mark.long
def test_other_random_numbers_after_a_resume_show_on_the_page(tmp_path: Path) -> None:
    code, results, page = start(tmp_path, [planted("other_seed")])
    assert code == 0
    assert "**other_seed: goal missed.** dense: bit-equal: no (goal yes)." in problems(page)
    figures = {figure.name: figure.value for figure in results.parts["other_seed"].figures}
    assert figures["dense: two runs without a kill are bit-equal"] is True
