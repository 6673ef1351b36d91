"""The report on a weight sync: of published models that nobody has here, and of a tiny one by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from tests.cli.test_plan import TINY, TWO_STAGES, nodes, write
from tests.helpers.golden import check_text
from tests.helpers.published import DEEPSEEK_V3_BF16, QWEN3_235B_A22B, QWEN25_72B
from tools.weight_sync import WeightSyncReport, main, report_weight_sync


def found(config: str, *overrides: str, rank: int | None = None) -> WeightSyncReport:
    return report_weight_sync(load_config(Path(config), overrides), rank)


def text_of(*arguments: str) -> str:
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """Two nodes of four: training by tp 2 and pp 2, engines of two ranks."""
    sections = {"actor": {"parallel": TWO_STAGES}, "rollout": {"tp": 2}, "reshard": {"bucket_mib": 1}}
    return write(tmp_path, TINY, slurm={"nodes": 2}, resources={"ranks_per_node": 4}, **sections)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("model", "count", "parallel", "rollout", "weights"),
    [
        (
            DEEPSEEK_V3_BF16,
            12,
            {"tp": 8, "pp": 12, "ep": 8, "first_stage_layers": 6, "last_stage_layers": 5},
            32,
            671e9,
        ),
        (QWEN3_235B_A22B, 4, {"tp": 4, "pp": 8, "ep": 4, "first_stage_layers": 11, "last_stage_layers": 11}, 8, 235e9),
        (QWEN25_72B, 12, {"tp": 8, "pp": 6, "first_stage_layers": 14, "last_stage_layers": 10}, 8, 72.7e9),
    ],
    ids=["deepseek-v3", "qwen3-235b", "qwen2.5-72b"],
)
def test_a_published_model_is_planned_without_its_weights(
    tmp_path: Path, model: dict[str, Any], count: int, parallel: dict[str, int], rollout: int, weights: float
) -> None:
    config = write(tmp_path, model, actor={"parallel": parallel}, rollout={"tp": rollout}, **nodes(count))
    report = found(config)
    received, local = report.sizes("received"), report.sizes("local")
    moved = sum(received.values()) + sum(local.values())
    # What every rank has, such as MLA's way down, comes on top.
    assert 1 <= moved / (2 * weights * report.placement.num_engines) < 1.06
    assert report.reaches_least
    assert sum(report.least.values()) == sum(received.values()) == sum(report.sizes("sent").values())
    assert report.plan.largest_bucket <= report.plan.bucket_bytes == 128 << 20
    assert report.buffer_bytes <= 512 << 20
    # The busiest rank sends little more than a rank receives.
    assert max(report.sizes("sent").values()) < 1.25 * max(received.values())


def test_engines_on_ranks_of_their_own_receive_each_byte_once_per_node(tiny: str) -> None:
    """Four trainers on one node, two engines of two ranks on the other."""
    words = ("placement=separate", "rollout.ranks=4")
    report = found(tiny, *words)
    assert (report.placement.engines.ranks.stop, report.placement.num_engines, report.reaches_least) == (8, 2, True)
    received, across = (sum(report.sizes(kind).values()) for kind in ("received", "received_across"))
    assert 2 * across <= received < 2.02 * across  # all four ranks have the norms
    assert not any(report.sizes("local").values())
    text = text_of(tiny, *words)
    assert "2 engine(s) of tp 2, on ranks 4-7 of their own" in text
    assert "of CPU memory at most on a rank" in text
    copies = found(tiny, *words, rank=5).plan.copies
    forwards = [copy for copy in copies if copy.source_rank == 5 and "proj.weight" in copy.tensor.name]
    assert {copy.target_rank for copy in forwards} == {7}


def test_the_report_by_heart(tiny: str, request: pytest.FixtureRequest) -> None:
    check_text("plan_weight_sync.txt", text_of(tiny), request.config.getoption("--accept-golden"))


def test_the_copies_of_a_rank_by_heart(tiny: str, request: pytest.FixtureRequest) -> None:
    text = text_of(tiny, "--rank", "5")
    check_text("plan_weight_sync_rank.txt", text, request.config.getoption("--accept-golden"))


def test_the_copies_of_a_rank_are_its_bytes(tiny: str) -> None:
    copies = found(tiny, rank=5).plan.copies
    assert {5} < {copy.source_rank for copy in copies} | {copy.target_rank for copy in copies}
    assert all(5 in (copy.source_rank, copy.target_rank) for copy in copies)
    assert all((copy.bucket < 0) == (copy.source_rank == copy.target_rank) for copy in copies)
    assert 0 in {copy.bucket for copy in copies}
    written = {(c.target.local_name, tuple(c.target.local_start)) for c in copies if c.target_rank == 5}
    assert len(written) == sum(copy.target_rank == 5 for copy in copies)
    assert ("model.layers.3.mlp.gate_up_proj.weight", (48, 0)) in written


def test_engines_over_whole_nodes_are_reported_and_others_refused(tiny: str) -> None:
    words = ["rollout.tp=4", "resources.ranks_per_node=2", "slurm.nodes=4"]
    assert "2 engine(s) of tp 4 over 2 nodes, on the same ranks" in text_of(tiny, *words)
    refused = CliRunner().invoke(main, [tiny, *words[:1], "slurm.nodes=2", "resources.ranks_per_node=6"]).exception
    assert isinstance(refused, UserError)
    assert "engines of 4 ranks neither divide a node of 6 nor" in str(refused)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--rank", "8"), "--rank: no rank 8; use 0 to 7"),
        (("rollout.tp=8",), "rollout.tp: 8 does not divide the model's 4"),
        (("actor.parallel.pp=3",), "actor.parallel"),
        (("model.path=/nowhere",), "model.path: no such folder"),
    ],
)
def test_mistakes_are_named(tiny: str, words: tuple[str, ...], line: str) -> None:
    assert str(CliRunner().invoke(main, [tiny, *words]).exception).startswith(line)
