"""A run is more than its steps: starts, validations and checkpoints count against the time limit of its jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.preflight import walltime_warnings
from rlhpc.plan.estimates.run_time import RunTime, check_walltime, checkpoint_bytes, validation_prompts
from rlhpc.plan.scenario import make_scenario
from tests.helpers.commands import invoke

READY = Path(__file__).parents[3] / "configs" / "ready"
SMALL = str(READY / "qwen2.5-7b-1node.yaml")
PLAIN = RunTime(
    steps=100,
    step=60.0,
    start=100.0,
    resume=20.0,
    validations=11,
    validation=30.0,
    saves=4,
    save=50.0,
    writes=2,
    write=80.0,
    read_bytes=1.0,
    saved_bytes=1.0,
    read_rate=1.0,
    write_rate=1.0,
)


def run_of(*changes: str, name: str = "qwen2.5-7b-1node") -> RunTime:
    case = make_scenario(load_config(READY / f"{name}.yaml", changes))
    assert case is not None
    return case.run(case.step())


def held_out(folder: Path, rows: int, name: str = "held.jsonl") -> str:
    (folder / name).write_text("{}\n" * rows + "\n")
    return str(folder / name)


def test_all_of_a_run_is_counted() -> None:
    assert PLAIN.seconds == 100 + 100 * 60 + 11 * 30 + 4 * 50 + 2 * 80
    assert PLAIN.first == 100 + 30 + 60 + 80
    assert replace(PLAIN, validation=None).seconds == PLAIN.seconds - 330


def test_time_limits() -> None:
    assert list(check_walltime(PLAIN, None)) == []
    assert list(check_walltime(PLAIN, 6790)) == []
    (warning,) = check_walltime(PLAIN, 6789)
    assert warning == (
        "slurm.time: 100 steps of 60 s, a start of 100 s, 11 validation(s) of 30 s and 4 checkpoint(s) of 50 s are "
        "predicted to take 1.9 hours, 2 jobs of the limit: the run checkpoints before it and is requeued"
    )
    (warning,) = check_walltime(PLAIN, 269)
    assert warning.startswith("slurm.time: the first step is predicted to be saved after 270 s (start 100 s, step 60 s")
    with pytest.raises(UserError, match=r"slurm.time: a step is predicted to take 60 s, the job has 50 s; raise it"):
        list(check_walltime(PLAIN, 50))
    assert list(check_walltime(replace(PLAIN, steps=0), 1)) == []


def test_each_job_starts_again() -> None:
    """By hand: a job of 1000 s has 1000 - 130 - 80 - 90 - 160 for steps of 65.3 s; a later one 10 more."""
    assert PLAIN.jobs(1000) == 1 + -(-(100 - 9) // 9)
    assert PLAIN.jobs(270) == 100, "a step in each"
    assert replace(PLAIN, start=400.0).jobs(1000) > PLAIN.jobs(1000)
    assert replace(PLAIN, resume=200.0).jobs(1000) > PLAIN.jobs(1000)


def test_reading_and_writing_are_bytes_over_the_disk() -> None:
    config = load_config(Path(SMALL))
    case = make_scenario(config)
    assert case is not None
    size = checkpoint_bytes(config, case.shape)
    quick = run_of("planning.start_seconds=0")
    assert quick.read_bytes == pytest.approx(2 * 7.6e9, rel=0.01)
    assert quick.start == pytest.approx(quick.read_bytes / 4e9)
    assert size / 2e9 < quick.write == quick.save < size / 2e9 + 1, "copies to the host beside"
    assert quick.resume == pytest.approx(size / 4e9, rel=0.01)
    assert run_of("planning.start_seconds=60").start == pytest.approx(60 + quick.start)
    slow = run_of("site.disk.node_write_gbps=0.5", "site.disk.node_read_gbps=0.4", "planning.start_seconds=0")
    assert slow.start == pytest.approx(10 * quick.start)
    assert slow.write > 3.9 * quick.write
    many = run_of(name="deepseek-v3-671b-96gpus")
    assert 9.3e12 / 7e9 < many.write < 9.5e12 / 7e9, "twelve nodes reach what the file system has"


def test_every_node_reads_what_its_ranks_hold() -> None:
    """Weights of 7.6 G parameters in two bytes: each of four nodes has all of them, or a quarter."""
    nodes = "qwen2.5-7b-math-4nodes"
    whole = run_of("actor.parallel.tp=1", "actor.parallel.pp=1", name=nodes).read_bytes
    assert whole == pytest.approx(4 * 2 * 7.6e9, rel=0.01)
    parts = run_of("actor.parallel.tp=4", "actor.parallel.pp=4", name=nodes).read_bytes
    assert 0.5 * whole < parts < 0.75 * whole, "two stages on a node, and the largest of them counts"
    judge = f"rewards=[{{model: {READY / 'models' / 'Qwen2.5-3B-Instruct'}}}]"
    judged = run_of(judge, "planning.start_seconds=0")
    assert judged.read_bytes == pytest.approx(2 * (7.6e9 + 3.1e9), rel=0.02)
    assert judged.start == pytest.approx(judged.read_bytes / 4e9)


def test_saves_are_those_that_the_loop_makes() -> None:
    def counts(*changes: str) -> tuple[int, int]:
        run = run_of(*changes)
        return run.saves, run.writes

    assert counts("train.steps=100", "checkpoint.every=20") == (4, 2), "the last one, and one after the first step"
    assert counts("train.steps=101", "checkpoint.every=20") == (5, 2)
    assert counts("train.steps=100", "checkpoint.every=0") == (0, 2)
    assert counts("train.steps=100", "checkpoint.every=1") == (99, 1)
    assert counts("train.steps=100", "checkpoint.every=20", "slurm.time=null") == (4, 1)


def test_keeping_the_best_may_save_after_each_validation(tmp_path: Path) -> None:
    best = (f"data.validation=[{held_out(tmp_path, 9)}]", "checkpoint.keep_best=reward_mean", "train.steps=100")
    assert run_of(*best, "checkpoint.every=20").saves == 4 + 5, "at 10, 30, 50, 70 and 90 none is due"
    assert run_of(*best, "checkpoint.every=5").saves == 19
    assert run_of(*best, "checkpoint.every=0").saves == 9


def test_exports_are_those_that_the_loop_makes_on_one_node(tmp_path: Path) -> None:
    """Two bytes for each parameter, at 2 GB/s."""
    own = (f"data.validation=[{held_out(tmp_path, 9)}]", "checkpoint.keep_best=reward_mean", "train.steps=100")
    own += ("checkpoint.every=20",)
    assert run_of(*own).exports == 0
    found = {at: run_of(*own, "checkpoint.export=hf", f"checkpoint.export_at={at}") for at in ("last", "best", "all")}
    saves = found["all"].saves + found["all"].writes
    assert {at: run.exports for at, run in found.items()} == {"last": 1, "best": 10, "all": saves}
    last = found["last"]
    assert last.exported_bytes == pytest.approx(2 * 7.6e9, rel=0.01)
    assert last.export == pytest.approx(last.exported_bytes / 2e9)
    assert last.seconds - run_of(*own).seconds == pytest.approx(last.export)


def test_a_save_in_the_background_costs_its_copies() -> None:
    at_once = run_of("checkpoint.every=20")
    behind = run_of("checkpoint.every=20", "checkpoint.asynchronous=true")
    assert behind.write == at_once.write
    assert behind.save < 0.02 * at_once.save
    often = run_of("checkpoint.every=1", "checkpoint.asynchronous=true")
    assert often.save == pytest.approx(at_once.save - often.step), "the next one waits for it"


def test_validation_takes_what_its_answers_take(tmp_path: Path) -> None:
    file = held_out(tmp_path, 500)
    run = run_of(f"data.validation=[{file}]", "train.steps=20", "validation.every=10")
    assert run.validations == 3, "one before the first step"
    assert run.validation is not None
    more = ("validation.samples_per_prompt=4", "validation.temperature=1")
    sampled = run_of(f"data.validation=[{file}]", *more)
    assert sampled.validation is not None
    assert run.validation < sampled.validation < 4 * run.validation
    unknown = run_of()
    assert (unknown.validations, unknown.validation) == (21, None)
    none = run_of("data.validation=[]")
    assert (none.validations, none.validation) == (0, 0.0)
    judge = f"rewards=[{{model: {READY / 'models' / 'Qwen2.5-3B-Instruct'}}}]"
    judged = run_of(f"data.validation=[{file}]", judge)
    assert judged.validation is not None
    assert judged.validation > run.validation


def test_held_out_prompts_are_counted_by_set(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    one, two = held_out(tmp_path, 50), held_out(tmp_path, 7, "two.jsonl")
    three = tmp_path / "three.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"x": list(range(40))}), three)

    def prompts(files: str, *changes: str) -> int | None:
        return validation_prompts(load_config(Path(SMALL), [f"data.validation={files}", *changes]))

    assert prompts(f"[{one}, {two}, {three}]") == 97
    assert prompts(f"[{one}, {three}]", "validation.max_prompts=30") == 30, "files without names are one set"
    named = f"[{{path: {one}, name: a}}, {{path: {three}, name: b}}]"
    assert prompts(named, "validation.max_prompts=30") == 60
    assert prompts("[nowhere.jsonl]") is None
    assert prompts("[nowhere.jsonl]", "validation.max_prompts=30") == 30
    assert prompts("[]") == 0


def test_a_job_that_is_too_short_is_reported_at_submission(tmp_path: Path) -> None:
    def error_line(*changes: str) -> list[str]:
        return walltime_warnings(load_config(Path(SMALL), ["planning.gpu=h200", *changes]))

    (warning,) = error_line("slurm.time=60", "train.steps=100000")
    assert warning.startswith("slurm.time: 100000 steps")
    assert error_line("planning.gpu=null", "slurm.gpu_type=null", "slurm.time=60") == []
    rare = ("train.steps=50", "slurm.time=60", "checkpoint.every=0", "data.validation=[]")
    assert error_line(*rare) == []
    (warning,) = error_line(*rare, "checkpoint.every=1")
    assert "and 49 checkpoint(s) of 5" in warning
    (warning,) = error_line(*rare, "planning.start_seconds=3000")
    assert "and a start of 3,004 s" in warning
    assert "4 jobs of the limit" in warning
    often = (f"data.validation=[{held_out(tmp_path, 30000)}]", "validation.every=1")
    (warning,) = error_line(*rare, *often)
    assert "and 51 validation(s) of" in warning


def test_a_plan_shows_what_is_outside_of_steps(tmp_path: Path) -> None:
    def plan(*arguments: str) -> str:
        done = invoke("plan", "run", SMALL, *arguments, catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    text = plan()
    assert "validations are not counted: their files cannot be read here" in text
    text = plan(f"data.validation=[{held_out(tmp_path, 500)}]")
    rows = [line.split("  ")[0] for line in text.splitlines()]
    at = rows.index("outside of steps")
    assert rows[at + 1 : at + 5] == ["start", "validation", "checkpoint", "save at once"]
    assert "not counted" not in text
    found = json.loads(plan("--json"))["run"]
    assert found["seconds"] == pytest.approx(run_of().seconds)


def test_a_sites_disk_is_overruled_by_the_configuration(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(yaml12.dump({"disk": {"node_write_gbps": 1.0, "node_read_gbps": 1.0}}))
    base, own = run_of(), run_of(f"site.file={site}", "site.disk.node_read_gbps=4")
    assert own.start == base.start
    assert own.write > 1.9 * base.write
