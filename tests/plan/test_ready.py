"""Every ready configuration is parsed, checked and planned; the table of published figures says what is true."""

from __future__ import annotations

import hashlib
import json
from math import prod
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.site import EfficiencySection
from rlhpc.models import read_model
from rlhpc.plan.checks.run import check_config, check_nodes, outline
from rlhpc.plan.checks.training import check_memory
from rlhpc.plan.estimates.hardware import named_gpu, read_site
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.plan.estimates.step_time import predict_step
from rlhpc.sharding.shards import model_tensors, num_parameters
from tests.helpers import published
from tools import published_table
from tools.markers import between
from tools.published_runs import OUTSIDE, Published

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs" / "ready").glob("*.yaml"))
# Billions of parameters, as the models' publishers say.
SIZES = {
    "DeepSeek-V3": 671.0,
    "Qwen3-235B-A22B": 235.1,
    "Qwen2.5-72B": 72.7,
    "Qwen2.5-32B": 32.8,
    "Qwen2.5-7B": 7.62,
    "Qwen2-7B-Instruct": 7.62,
    "Qwen2.5-3B-Instruct": 3.09,
    "Qwen2.5-1.5B-Instruct": 1.54,
    "Qwen2.5-0.5B-Instruct": 0.494,
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_ready_configuration_is_checked_and_planned(file: Path) -> None:
    assert file.read_text().startswith("# yaml-language-server: $schema=../schema.json\n")
    config = load_config(file)
    shape = read_model(ROOT / config.model.path)
    assert outline(config)
    layout = check_nodes(config, config.slurm.most_nodes, shape)
    check_memory(config.actor.memory, shape, layout)
    # All else that a run is refused for, but for its model's weights, which are not here.
    elsewhere = config.model.model_copy(update={"path": Path("nowhere")})
    check_config(config.model_copy(update={"model": elsewhere}), prepared=False)
    config = load_config(file)
    site = read_site(config)
    gpu = named_gpu(config, site)
    assert gpu is not None
    step = predict_step(config, shape, layout, gpu, site.efficiency)
    assert step.engine_fits
    assert 0.1 < step.mfu < 0.6
    in_step = [phase for phase in predict_memory(config, shape, layout, gpu.memory_gib).phases if phase.name != "save"]
    assert min(phase.total for phase in in_step) > 2**30


@pytest.mark.parametrize("name", SIZES)
def test_models_have_as_many_parameters_as_published(name: str) -> None:
    shape = read_model(ROOT / "configs" / "ready" / "models" / name)
    count = sum(prod(tensor.shape) for tensor in model_tensors(shape))
    assert count / 1e9 == pytest.approx(SIZES[name], rel=0.005)
    assert num_parameters(shape) == count


# From copies of the published config.json files in public repositories: layers, hidden size, heads, key-value
# heads, feed-forward size, vocabulary, positions, rope_theta, rms_norm_eps, tied embeddings.
FIELDS = {
    "DeepSeek-V3": (61, 7168, 128, 128, 18432, 129280, 163840, 1e4, 1e-6, False),
    "Qwen3-235B-A22B": (94, 4096, 64, 4, 12288, 151936, 40960, 1e6, 1e-6, False),
    "Qwen2.5-72B": (80, 8192, 64, 8, 29568, 152064, 131072, 1e6, 1e-5, False),
    "Qwen2.5-32B": (64, 5120, 40, 8, 27648, 152064, 131072, 1e6, 1e-5, False),
    "Qwen2.5-7B": (28, 3584, 28, 4, 18944, 152064, 131072, 1e6, 1e-6, False),
    "Qwen2-7B-Instruct": (28, 3584, 28, 4, 18944, 152064, 32768, 1e6, 1e-6, False),
    "Qwen2.5-3B-Instruct": (36, 2048, 16, 2, 11008, 151936, 32768, 1e6, 1e-6, True),
    "Qwen2.5-1.5B-Instruct": (28, 1536, 12, 2, 8960, 151936, 32768, 1e6, 1e-6, True),
    "Qwen2.5-0.5B-Instruct": (24, 896, 14, 2, 4864, 151936, 32768, 1e6, 1e-6, True),
}


@pytest.mark.parametrize("name", SIZES)
def test_models_are_as_published(name: str) -> None:
    shape = read_model(ROOT / "configs" / "ready" / "models" / name)
    sizes = (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.ffn_size)
    rest = (shape.vocab_size, shape.max_positions, shape.rope.theta, shape.norm_epsilon, shape.tied_embeddings)
    assert (*sizes, *rest) == FIELDS[name]
    assert (shape.rope.kind == "yarn") == (name == "DeepSeek-V3")
    if name == "Qwen3-235B-A22B":
        assert shape.experts is not None
        assert (shape.experts.num_experts, shape.experts.top_k, shape.experts.ffn_size) == (128, 8, 1536)


def test_each_model_has_a_configuration() -> None:
    used = {load_config(file).model.path.name for file in FILES}
    assert used == set(SIZES) == {folder.name for folder in (ROOT / "configs" / "ready" / "models").iterdir()}


def test_files_that_tests_know_are_the_same() -> None:
    """As they were copied, in canonical JSON."""
    known = (published.DEEPSEEK_V3_BF16, published.QWEN25_72B, published.QWEN3_235B_A22B)
    digests = [hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16] for fields in known]
    assert digests == ["04b502920c0fde5b", "88517628c3ff3c0b", "dbebeba721aed088"]


def test_steps_are_near_what_was_published() -> None:
    for row in published_table.FITTED:
        for name, message, found in published_table.figures(row):
            if name.startswith(("step", "rollout")):
                assert found == pytest.approx(message, rel=0.35), (row.name, name)
            elif name.startswith("MFU"):
                assert found == pytest.approx(message, rel=0.1), (row.name, name)


STEPS = [row for row in published_table.BLIND if row.step is not None]


@pytest.mark.parametrize("row", [*published_table.HELD_OUT, *STEPS], ids=lambda row: row.name)
def test_runs_that_no_factor_was_fitted_on_are_within_three_tenths(row: Published) -> None:
    case = published_table.published_case(row)
    assert case.layout.world_size == case.config.slurm.most_nodes * case.config.resources.ranks_per_node
    found = list(published_table.figures(row))
    assert len(found) == 1
    for name, message, predicted in found:
        assert predicted == pytest.approx(message, rel=0.3), name


def test_factors_are_those_that_the_tool_fits() -> None:
    efficiency = EfficiencySection()
    least, share = published_table.fit_error(efficiency.compute, efficiency.kernel_us)
    assert share == OUTSIDE
    for compute, kernel in ((0.97, 1), (1.03, 1), (1, 0.95), (1, 1.05)):
        assert published_table.fit_error(compute * efficiency.compute, kernel * efficiency.kernel_us)[0] > least


def test_the_pages_tables_are_written_by_the_tool() -> None:
    assert between(published_table.MEASUREMENTS, "published-table") == published_table.published_table(
        published_table.FITTED
    )
    assert between(published_table.MEASUREMENTS, "held-out-table") == published_table.published_table(
        published_table.HELD_OUT
    )
    assert between(published_table.MEASUREMENTS, "blind-table") == published_table.published_table(
        published_table.BLIND
    )
    assert between(published_table.MEASUREMENTS, "constants-table") == published_table.constants_table()
    assert between(published_table.PAGE, "ready-table") == published_table.ready_table()
    assert between(published_table.PAGE, "published-summary") == published_table.summary()
