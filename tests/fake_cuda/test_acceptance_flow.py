"""What acceptance decides and reports where there is a GPU: the driver, the cases of each part, and runs as given."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import shapes
from bench.acceptance import decode, driver, grpo, process, runs
from bench.acceptance.driver import Options, accept
from bench.acceptance.grpo import peaks_file
from bench.acceptance.mfu import RECOMPUTE, Subject, most_layers, planned_bytes
from bench.acceptance.results import STATE, Context, Goal, read_results
from bench.acceptance.several_ranks import AXES, RankSetup
from bench.shapes import model_shape
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record
from rlhpc.launch import machine
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.memory import GIB, predict_memory
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import model_tensors
from tests.bench.acceptance.fake_parts import part
from tests.bench.acceptance.part_runs import Results, figures, missed, skipped
from tests.bench.acceptance.test_device import nvml
from tests.bench.acceptance.test_grpo import records, steps
from tests.helpers.fake_cuda import FakeCuda

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as stand_in:
        yield stand_in


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One GPU. Bytes in use at each look of the driver; the last one stays."""
    _install_gpus(tmp_path, monkeypatch, 1)
    looks = [GIB]

    def memory(handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 << 30, used=looks.pop(0) if len(looks) > 1 else looks[0])

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetMemoryInfo=memory))
    return looks


def _install_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    devices = folder / "dev"
    devices.mkdir(exist_ok=True)
    for number in range(count):
        (devices / f"nvidia{number}").touch()
    monkeypatch.setattr(machine, "_DEVICES", devices)
    monkeypatch.delenv(env.CUDA_VISIBLE_DEVICES, raising=False)


def context(folder: Path, results: Results, size: str = "tiny") -> Context:
    return Context(folder, size, True, results.append)  # type: ignore[arg-type]


@pytest.mark.workers
def test_the_next_part_waits_for_the_memory_of_the_last(
    tmp_path: Path, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full sizes are selected, and the driver looks again until what was in use before the part is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    used[:] = [GIB, GIB, 6 * GIB, 3 * GIB, GIB + 1, 7 * GIB]  # fingerprint, before the part, three looks after it
    assert accept(Path("out"), [part("good", needs_gpu=True)], Options()) == 0
    assert used == [7 * GIB]
    record = read_results(Path("out", STATE)).parts["good"]
    assert (record.status, record.size) == ("passed", "full")


def test_memory_is_waited_for_with_an_end(used: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for after a part that began with the 1 GiB that is in use; for 4 GiB it is, with an end."""
    waited: list[float] = []
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: len(waited), sleep=waited.append))
    driver._wait_for_memory(GIB)
    assert not waited
    used[:] = [4 * GIB]
    driver._wait_for_memory(GIB)
    assert len(waited) == driver._RELEASE_SECONDS, "no longer than that, one look a second here"


def test_processes_of_a_gpu_compile_and_keep_the_order_of_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (env.CUDA_DEVICE_MAX_CONNECTIONS, env.TORCHDYNAMO_DISABLE):
        monkeypatch.delenv(name, raising=False)
    environment = process.part_environment(tmp_path, on_gpu=True)
    assert environment[env.CUDA_DEVICE_MAX_CONNECTIONS] == "1"
    assert env.TORCHDYNAMO_DISABLE not in environment


def test_decoding_is_compared_with_and_without_graphs(tmp_path: Path) -> None:
    tiny, full = (decode.comparisons(context(tmp_path, [], size)) for size in ("tiny", "full"))
    assert [[one.name for one in group] for group in tiny] == [["tiny, CUDA graphs", "tiny, eager"]]
    assert [[one.name for one in group] for group in full] == [
        ["8b, CUDA graphs", "1.5b, CUDA graphs"],
        ["8b, eager", "1.5b, eager"],
    ]
    assert [call.arguments["comparison"]["graphs"] for call in full[0][0].calls] == [True, True]


@pytest.mark.parametrize(
    ("gpus", "ranks", "backend", "refused"),
    [
        (1, 2, "gloo, shared GPU", {"pp": "gloo cannot send device tensors"}),
        (2, 2, "nccl", {"pp": ""}),
        (8, 4, "nccl", {"pp": "", "tp x cp": ""}),
    ],
)
def test_several_gpus_run_what_one_cannot(
    gpus: int, ranks: int, backend: str, refused: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install_gpus(tmp_path, monkeypatch, gpus)
    found = RankSetup.of(context(tmp_path, []))
    assert (found.ranks, found.backend) == (ranks, backend)
    expected = {"tp": "", "tp x cp": "needs 4 GPUs", **refused}
    assert {axis.name: found.refusal(axis) for axis in AXES["dense"] if axis.name in expected} == expected


def test_the_demo_trains_in_half_precision_on_at_most_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, ranks in ((1, 1), (3, 2)):
        _install_gpus(tmp_path, monkeypatch, gpus)
        config = runs.demo_config(context(tmp_path, [], "full"))
        assert (config.model.dtype, config.resources.ranks_per_node) == ("bfloat16", ranks)
        assert config.train.steps == config.checkpoint.every == runs.DEMO_STEPS


@pytest.mark.heavy
def test_weights_are_sampled_on_the_gpu_and_repeat(tmp_path: Path, cuda: FakeCuda) -> None:
    """And nothing is left in PyTorch's cache for the processes that load the model."""
    tensors, files = model_tensors(model_shape("tiny")), []
    for number, std in enumerate((0.02, 0.02, 0.1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        shapes._write_weights(folder, tensors, "bfloat16", std)
        files.append((folder / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]
    assert torch.cuda.max_memory_allocated() > 0
    assert cuda.bytes_held == 0
    assert cuda.count("empty_cache") == 3


def test_the_least_recomputation_that_fits_is_tried_first() -> None:
    shape = model_shape("tiny-moe")
    sizes = [planned_bytes(shape, 4096, memory) for memory in RECOMPUTE]
    assert sizes == sorted(sizes, reverse=True)
    for number, size in enumerate(sizes):
        assert list(Subject(shape).fitting(4096, size)) == list(RECOMPUTE[number:])
    assert list(Subject(shape).fitting(4096, 0)) == [RECOMPUTE[-1]]
    assert most_layers(lambda count: model_shape("tiny", min(count, 2)), 64, 0) == 1


# ---- runs, whose records and peaks are given


def _grpo(folder: Path, monkeypatch: pytest.MonkeyPatch, size: str, others: int) -> tuple[Results, RunConfig]:
    """1.5B's steps at the plan's pace and with its peak, ``others`` bytes being in use by other processes."""
    results, configs = Results(), []

    def run(config: RunConfig, entry: str) -> list[Record]:
        assert entry == "bench.acceptance.grpo:run_rank"
        configs.append(config)
        config.folder.mkdir()
        shape = model_shape("tiny" if size == "tiny" else "1.5b")
        peak = predict_memory(config, shape, ParallelLayout(1), 80.0).peak + others
        write_json(peaks_file(RunFolder(config.folder)), {"used": {"rollout": peak}, "allocated": {"rollout": GIB}})
        return steps(config, shape, [9.0, 1.0, 1.0, 1.0])

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(grpo, "_write_model", lambda *_: None)
    folder.mkdir()
    grpo.run_1_5b(context(folder, results, size))
    return results, configs[0]


def test_steps_of_a_known_gpu_are_held_to_the_plan(
    tmp_path: Path, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    used[:] = [3 * GIB]
    results, config = _grpo(tmp_path / "known", monkeypatch, "full", others=3 * GIB)
    found = figures(results)
    assert not missed(results)
    assert not skipped(results)
    assert (config.model.dtype, config.rollout.gpu_memory_utilization) == ("bfloat16", grpo.LARGE["1.5b"].engine_share)
    assert config.rollout.kv_cache_gib is None
    assert found["layers"].value == 28
    memory, seconds = found["memory: error of the plan's peak"], found["time: error of the plan"]
    assert (memory.value, memory.goal) == (pytest.approx(0.0, abs=1e-6), Goal("<=", grpo.MEMORY_ERROR))
    assert (seconds.value, seconds.goal) == (pytest.approx(0.0, abs=1e-6), Goal("<=", grpo.TIME_ERROR))
    assert found["memory: rollout"].unit == "GiB"
    assert found["MFU of updates"].note == f"of {GPUS['h100'].tflops:g} TFLOP/s"


@pytest.mark.parametrize(("name", "size"), [("NVIDIA X1", "full"), ("NVIDIA H100 80GB HBM3", "tiny")])
def test_steps_of_an_unknown_gpu_and_tiny_ones_have_no_goals(
    name: str, size: str, tmp_path: Path, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.modules["pynvml"].nvmlDeviceGetName = lambda handle: name  # type: ignore[attr-defined]
    results, _ = _grpo(tmp_path / "unknown", monkeypatch, size, others=GIB)
    found, unknown = figures(results), size == "full"
    reason = f"{name} is not in the planner's table (site.gpus)"
    assert skipped(results) == ({"goals of the plan": reason} if unknown else {})
    assert all(figure.goal is None for figure in found.values())
    assert found["memory: error of the plan's peak"].value == pytest.approx(0.0, abs=1e-6), "of the memory it has"


def test_recovery_of_experts_names_the_kernels_without_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[str] = []
    found = {"moe-straight": records(2.0, 1.0), "moe-resumed": records(2.0, 1.001)}

    def run(config: RunConfig, **_: object) -> list[Record]:
        dtypes.append(config.model.dtype)
        return found[config.name]

    def write(folder: Path, name: str, dtype: str, std: float) -> Path:
        dtypes.append(dtype)
        return folder

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(runs, "run_and_kill", lambda config, after: None)
    monkeypatch.setattr(runs.arithmetic, "make", lambda folder: None)
    monkeypatch.setattr(runs, "write_model", write)
    results: Results = []
    runs.run_experts(context(tmp_path, results))
    assert dtypes == ["bfloat16"] * 3
    equal = figures(results)["experts: bit-equal"]
    assert (equal.value, equal.goal) == (False, None)
    assert "atomics" in equal.note
    assert not missed(results)
