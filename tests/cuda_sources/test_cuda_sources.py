"""Each allowed vLLM release has what rlhpc asks of it on a GPU: its CUDA wheel's own Python sources, run on a CPU.

`make test-cuda-sources` runs all releases and families; `make test-all` one release, if its sources are in the cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from tests.cuda_sources import changed, names, releases
from tests.tiers.imports import ROOT

KINDS = ("llama", "qwen2", "qwen2_tied", "qwen3", "mixtral", "qwen3moe", "dsv3")
# Tensors of attention layers beside parameters and buffers, and why a level-2 sleep may lose them.
HARMLESS = {
    **dict.fromkeys(("q_range", "k_range", "v_range"), "read with calculate_kv_scales alone, of an fp8 cache"),
    **dict.fromkeys(("_k_scale_cpu", "_v_scale_cpu"), "read by ROCm's attention alone"),
}


@pytest.fixture(scope="session")
def facts(release: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the probe found in a process of its own: of all families where releases were asked for, else of one."""
    asked = request.config.getoption("--vllm-releases")
    folder = releases.fetch(release)
    out = tmp_path_factory.mktemp("facts") / f"{release}.json"
    kinds = KINDS if asked else ("qwen3moe",)
    command = [sys.executable, "-m", "tests.cuda_sources.probe", str(folder), str(out), *kinds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"vLLM {release} cannot be imported\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(out.read_text(encoding="utf-8"))


pytestmark = [pytest.mark.heavy, pytest.mark.long]


def test_every_argument_of_the_engine_exists(facts: dict[str, Any]) -> None:
    assert facts["arguments"] == []


def test_everything_imported_from_vllm_exists(facts: dict[str, Any]) -> None:
    assert facts["imports"] == []


def test_every_attribute_and_parameter_that_is_used_exists(facts: dict[str, Any]) -> None:
    assert facts["attributes"] == {}
    assert facts["parameters"] == {}


def test_sampling_parameters_are_accepted(facts: dict[str, Any]) -> None:
    found = facts["sampling"]
    assert found == {
        "seed": 2**40,
        "stop": [7, 8],
        "flat": True,
        "top_k": [5, 1],
        "temperature": [0.5, 1.0],
        "form": "a+",
    }


def test_kept_tokens_are_returned_by_the_v2_runner(facts: dict[str, Any]) -> None:
    """And read from where vLLM has them; this package's recorder finds them with V1."""
    for kind, kept in facts["kept"].items():
        assert "error" not in kept, (kind, kept.get("traceback"))
        assert kept["returned"] == (kept["known"] and facts["families"][kind]["runner"] == "V2"), kind
        assert not kept.get("missing"), kind


def test_every_family_is_configured_to_sleep_with_graphs(facts: dict[str, Any]) -> None:
    for kind, family in facts["families"].items():
        assert family["sleep"], kind
        assert "NONE" not in family["graphs"], kind


def test_the_runner_is_v2_or_for_models_with_experts_v1(facts: dict[str, Any]) -> None:
    """V1, whose generators rlhpc reseeds, costs a kernel for each seeded request and token: dense models avoid it."""
    for kind, family in facts["families"].items():
        assert family["runner"] in (("V1", "V2") if kind in facts["routed_experts"] else ("V2",)), kind


def test_parameters_are_those_that_a_weight_sync_writes(facts: dict[str, Any]) -> None:
    for kind, family in facts["families"].items():
        assert "model" not in family, family["model"]["traceback"]
        assert family["refused"] == "", kind
        assert family["never written"] == [], kind


def test_no_tensor_is_lost_in_a_sleep_of_level_2(facts: dict[str, Any]) -> None:
    """The weight sync writes parameters, and vLLM restores buffers; other tensors made with the model would be lost.

    Those that vLLM derives after loading, of latent attention alone, are renewed by LiveWeights.close.
    """
    lost = {
        f"{kind}: {name}"
        for kind, family in facts["families"].items()
        for name in family["plain"]
        if not (name.partition(".")[0] in ("Attention", "MLAAttention") and name.partition(".")[2] in HARMLESS)
    }
    assert lost == set()


def test_a_sleep_gives_back_weights_and_cache_and_waking_takes_them_in_two_steps(facts: dict[str, Any]) -> None:
    sleep = facts["sleep"]
    assert "error" not in sleep, sleep["traceback"]
    assert {"weights", "kv_cache"} <= set(sleep["tags"])
    assert {"weights", "kv_cache"} <= set(sleep["asleep"])
    assert "weights" not in sleep["asleep with weights awake"]
    assert "kv_cache" in sleep["asleep with weights awake"]
    assert sleep["asleep when awake"] == []
    assert sleep["asleep again"] == sleep["asleep"]
    assert sleep["errors"] == []
    assert sleep["buffers restored"]


def test_a_sleep_may_leave_less_free_memory_as_another_process_takes_some(facts: dict[str, Any]) -> None:
    """Unlike in vLLM's own worker."""
    assert facts["sleep"]["memory taken meanwhile"] == [False, True]


def test_the_sampler_does_not_import_flashinfer(facts: dict[str, Any]) -> None:
    """Unlike with vLLM's own defaults."""
    assert facts["sampler"] == {"defaults": "ModuleNotFoundError", "ours": False}


def test_a_sleep_keeps_all_other_contents(facts: dict[str, Any]) -> None:
    """Weights are written again, the cache starts empty, and a workspace holds nothing between two steps."""
    sleep = facts["sleep"]
    rewritten = {"weights", "kv_cache", "workspace"}
    assert set(sleep["asleep"]) - rewritten <= set(sleep["contents kept"])


def test_both_steps_of_waking_reach_the_workers(facts: dict[str, Any]) -> None:
    executor = facts["executor"]
    assert "error" not in executor, executor["traceback"]
    assert executor["calls"] == [
        ["sleep", {"level": 2}],
        ["wake_up", {"tags": ["weights"]}],
        ["wake_up", {"tags": ["kv_cache"]}],
    ]
    assert not executor["asleep"]


def test_an_engine_wants_its_share_of_memory_free_even_if_the_cache_s_size_is_given(facts: dict[str, Any]) -> None:
    """``rollout.gpu_memory_utilization`` of the device, or vLLM raises ValueError."""
    for given in ("given", "not given"):
        assert facts["memory"][f"89 GiB free, cache {given}"] == "ValueError"
        assert facts["memory"][f"91 GiB free, cache {given}"] == "ok"


def test_routed_experts_are_returned(facts: dict[str, Any]) -> None:
    """With several steps in flight only where vLLM keeps them apart."""
    for kind, routed_experts in facts["routed_experts"].items():
        assert "error" not in routed_experts, (kind, routed_experts["traceback"])
        assert routed_experts["arguments"]["enable_return_routed_experts"] is True
        assert routed_experts["captured"], kind
        assert routed_experts["async"] == routed_experts["steps kept apart"], kind


def test_the_table_of_names_is_complete() -> None:
    table = set(names.ATTRIBUTES["vllm.v1.engine.llm_engine:LLMEngine"])
    assert names.engine_accesses() <= table
    assert ("vllm", "LLMEngine") in names.imports()
    assert ("vllm.v1.worker", "gpu_worker") in names.imports()


def test_members_are_found_however_a_class_makes_them() -> None:
    assert {"annotated", "assigned", "registered", "method"} <= names.members(_Example)
    assert "read" not in names.members(_Example)


class _Example:
    annotated: int

    def __init__(self) -> None:
        self.assigned = self.read  # type: ignore[attr-defined]
        self.method("registered")

    def method(self, name: str) -> None: ...


def test_the_releases_are_those_that_the_pins_allow() -> None:
    published = ["0.33.0", "0.32.0", "0.9.2", "0.25.1", "0.25.0", "0.24.0", "0.32.0rc1"]
    assert releases.allowed(published, SpecifierSet(">=0.25,<0.33")) == ["0.25.0", "0.25.1", "0.32.0"]
    assert set(releases.CI_RELEASES) == set(releases.allowed(releases.CI_RELEASES, releases.pinned()))


def test_of_a_wheel_only_python_is_kept(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as archive:
        for name in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm/v1/core.py", "vllm/config.json"):
            archive.writestr(name, "x = 1")
    releases.keep_python(tmp_path / "vllm.whl", tmp_path / "out")
    found = [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")]
    assert sorted(found) == ["vllm/__init__.py", "vllm/v1/core.py"]


@pytest.mark.parametrize(
    ("files", "runs"),
    [
        (["README.md", "rlhpc/sharding/engine_shards.py"], True),
        (["pyproject.toml"], True),
        (["rlhpc/rollout/vllm_engine.py"], True),
        (["rlhpc/trainer/step.py", "docs/planning.md"], False),
    ],
)
def test_ci_checks_them_when_pins_or_rollout_changed(tmp_path: Path, files: list[str], runs: bool) -> None:
    """In the commits of the day before the newest, of a full clone; always in a shallow one."""
    repository = _repository(tmp_path / "full", files)
    assert bool(changed.changed_files(repository)) == runs
    shallow = tmp_path / "shallow"
    _git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", str(shallow))
    assert changed.changed_files(shallow)


def test_ci_passes_and_reports_it_where_the_index_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changed, "changed_files", lambda: ["pyproject.toml"])
    for name, value in {
        "XDG_CACHE_HOME": str(tmp_path),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": "",
    }.items():
        monkeypatch.setenv(name, value)
    assert changed.main() == 0
    assert capsys.readouterr().out.startswith("CUDA sources: not checked, pip cannot download vllm 0.25.0: ")
    with pytest.raises(releases.Unreachable, match="cannot list"):
        releases.published()


def _repository(root: Path, files: list[str]) -> Path:
    """A commit of long ago that changed everything, one that changed ``files``, and one that changed another."""
    root.mkdir()
    _git(root, "init", "--quiet")
    steps = [
        ("2026-01-01T10:00", [*changed.WATCHED, *files]),
        ("2026-03-01T10:00", files),
        ("2026-03-01T12:00", ["a.txt"]),
    ]
    for date, changes in steps:
        for name in changes:
            path = root / name
            path = path / "x.py" if name.endswith("/") else path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(date)
        _git(root, "add", ".")
        _git(root, "commit", "--quiet", "-m", date, date=date)
    return root


def _git(root: Path, *arguments: str, date: str = "2026-03-01T00:00") -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
    dates = {"GIT_COMMITTER_DATE": f"{date} +0000", "GIT_AUTHOR_DATE": f"{date} +0000"}
    subprocess.run(
        ["git", *settings, *arguments], cwd=root, check=True, env={**os.environ, **dates}, capture_output=True
    )
