"""Virtual costs get into the configuration once: at submission or at the start, and those of a run stay."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.folder import RunFolder
from rlhpc.launch.resolved import resolved
from rlhpc.launch.runs import submit
from rlhpc.launch.supervise import local

READY = Path(__file__).parents[2] / "configs" / "ready" / "qwen2.5-7b-1node.yaml"
SEPARATE = ("placement=separate", "rollout.ranks=4", "rollout.gpu_memory_utilization=0.9")
TIME = "data.template_time=2024-07-26T12:00"
COSTS = ("step_seconds", "sequence_seconds", "train_seconds")


def config_of(*changes: str) -> RunConfig:
    return load_config(READY, [*SEPARATE, *changes])


def costs_of(config: RunConfig) -> list[float | None]:
    return [getattr(config.asynchrony.costs, name) for name in COSTS]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def test_costs_are_predicted_and_those_of_the_config_stay(folder: RunFolder) -> None:
    found = resolved(config_of(), folder)
    assert all(value is not None and 0 < value < 1e3 for value in costs_of(found))
    given = resolved(config_of("asynchrony.costs.train_seconds=7"), folder)
    assert costs_of(given) == [*costs_of(found)[:2], 7.0]
    assert found.asynchrony.costs.tool_seconds == 1.0
    assert resolved(found, folder) is found


def test_a_resumed_run_keeps_its_costs(folder: RunFolder) -> None:
    first = resolved(config_of(), folder)
    save_config(folder, first)
    again = resolved(config_of("planning.response_tokens=100", "asynchrony.costs.tool_seconds=3"), folder)
    assert costs_of(again) == costs_of(first)
    assert again.asynchrony.costs.tool_seconds == 3.0
    assert costs_of(resolved(load_config(folder.config), folder)) == costs_of(first)
    other = resolved(config_of("asynchrony.costs.step_seconds=0.5"), folder)
    assert costs_of(other) == [0.5, *costs_of(first)[1:]]
    written = yaml12.parse(folder.config.read_text(), "")["asynchrony"]["costs"]
    assert [written[name] for name in COSTS] == costs_of(first)


def test_the_time_of_templates_is_that_of_the_first_attempt(folder: RunFolder) -> None:
    first = resolved(config_of(), folder)
    assert abs((datetime.now() - first.data.template_time).total_seconds()) < 600
    given = first.data.model_copy(update={"template_time": datetime(2024, 7, 26)})
    save_config(folder, first.model_copy(update={"data": given}))
    assert resolved(config_of(), folder).data.template_time == datetime(2024, 7, 26)
    assert resolved(config_of("data.template_time=2025-01-02T03:04:05"), folder).data.template_time.year == 2025


def test_cpus_and_unknown_gpus_have_defaults(folder: RunFolder) -> None:
    on_cpu = resolved(config_of("slurm.gpus_per_node=0", "asynchrony.max_staleness=0"), folder)
    # 4 engines, 256 x 8 responses of 300 tokens, 256 at once.
    assert costs_of(on_cpu) == [0.02, 0.001, pytest.approx(2048 / 4 * 300 / 256 * (0.02 + 256 * 0.001))]
    unknown = resolved(config_of("planning.gpu=null", "asynchrony.max_staleness=0"), folder)
    assert costs_of(unknown) == costs_of(on_cpu)


@pytest.mark.parametrize("changes", [(), ("slurm.gpus_per_node=0",)], ids=["h100", "cpu"])
def test_trainers_that_lend_get_a_time_for_it_once(folder: RunFolder, changes: tuple[str, ...]) -> None:
    tailed = (*changes, "planning.response_spread=1", "planning.response_tokens=1000")
    tailed = (*tailed, "rollout.max_response_tokens=8192", "rollout.ranks=2")
    lending = (*tailed, "placement=lend", "rollout.gpu_memory_utilization=0.5")
    found = resolved(config_of(*lending), folder)
    assert costs_of(found) == costs_of(resolved(config_of(*tailed), folder))
    lend = found.asynchrony.costs.lend_seconds
    assert lend is not None
    assert 0 < lend < 1e3
    save_config(folder, found)
    shorter = ("planning.response_tokens=100", "asynchrony.costs.train_seconds=9")
    assert resolved(config_of(*lending, *shorter), folder).asynchrony.costs.lend_seconds == lend
    assert resolved(config_of(*tailed), folder).asynchrony.costs.lend_seconds is None
    given = resolved(config_of(*lending, "asynchrony.costs.lend_seconds=0"), folder)
    assert given.asynchrony.costs.lend_seconds == 0


def test_colocated_runs_have_none(folder: RunFolder) -> None:
    colocated = load_config(READY, ["rollout.max_num_seqs=64", TIME])
    assert resolved(colocated, folder) is colocated
    evaluating = config_of("train.steps=0", "rollout.max_num_seqs=64", TIME)
    assert resolved(evaluating, folder) is evaluating


MANY = ("train.prompts_per_step=1024", "data.validation=[]", "planning.response_tokens=500")


def sequences(folder: RunFolder, *changes: str) -> int | None:
    return resolved(load_config(READY, [*MANY, *changes]), folder).rollout.max_num_seqs


def test_concurrent_sequences_follow_the_cache_and_stay_in_a_resumed_run(folder: RunFolder) -> None:
    found = sequences(folder)
    assert found is not None
    assert 256 < found < 1024
    assert sequences(folder, "rollout.max_num_seqs=300") == 300
    save_config(folder, resolved(load_config(READY, list(MANY)), folder))
    other_lengths = "planning.response_tokens=100"
    assert sequences(folder, other_lengths) == found
    assert sequences(RunFolder(folder.path / "new"), other_lengths) == 1024
    assert sequences(folder, other_lengths, "rollout.gpu_memory_utilization=0.55") == 1024
    assert sequences(folder, "train.prompts_per_step=64") == 64  # 8 engines, 8 samples of each prompt


def test_a_submission_and_a_local_run_write_the_concurrent_sequences(folder: RunFolder) -> None:
    config = load_config(READY, list(MANY))
    with submit.written_submission(config, folder):
        submitted = load_config(folder.config)
    local.write_config(load_config(READY, [*MANY, "planning.response_tokens=100"]), folder)
    assert submitted.rollout.max_num_seqs == sequences(RunFolder(folder.path / "new"))
    assert load_config(folder.config).rollout == submitted.rollout


def test_a_submission_and_a_local_run_write_them(folder: RunFolder) -> None:
    with submit.written_submission(config_of(), folder):
        submitted = load_config(folder.config)
    assert None not in costs_of(submitted)
    changed = config_of("planning.response_tokens=100")
    local.write_config(changed, folder)
    assert costs_of(load_config(folder.config)) == costs_of(submitted)
    assert costs_of(resolved(changed, RunFolder(folder.path / "new"))) != costs_of(submitted)


def test_sums_of_gradients_are_chosen_once(folder: RunFolder) -> None:
    """On a GPU that holds them, they are kept whole; a resumed run sums in the same order."""
    mesh = ["train.backend=fsdp", "actor.parallel={}", "planning.gpu=b200", "rollout.max_num_seqs=64"]
    first = resolved(load_config(READY, mesh), folder)
    assert first.actor.memory.accumulation == "keep"
    save_config(folder, first)
    smaller = load_config(READY, [*mesh, "planning.gpu=h100"])
    assert resolved(smaller, RunFolder(folder.path / "other")).actor.memory.accumulation == "reduce"
    same = load_config(READY, [*mesh, "planning.gpu=h100"])
    assert resolved(same, folder).actor.memory.accumulation == "keep"
    fixed = load_config(READY, [*mesh, "actor.memory.accumulation=reduce"])
    assert resolved(fixed, folder).actor.memory.accumulation == "reduce"
    megatron = load_config(READY, ["rollout.max_num_seqs=64", TIME])
    assert resolved(megatron, folder) is megatron
