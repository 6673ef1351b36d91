"""The table of durations: wall and CPU seconds of every test function, as runs measured them.

``python -m tests.tiers.durations`` prints each tier's time, the lanes of `make test` and the dearest functions;
``record FILE …`` stores what runs have measured (``build/lanes/*.json``). ``make durations`` runs all and does both.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tiers.imports import ROOT

TIERS = ("check", "test", "more", "long")  # in the order of the commands that run them first
TABLE = Path(__file__).with_name("durations.tsv")
CAPABILITIES = ROOT / "docs" / "capabilities.md"
_HEADER = ("tier", "function", "resources", "cases", "seconds", "cpu")
_WORK = "# CPU seconds of tests.tiers.meter.fixed_work: "

# CPU seconds of a function of `make test`, all its cases and fixtures included.
_FUNCTION, _SLURM_FUNCTION = 12.0, 24.0
OWN_LIMITS = {
    "tests/backends/test_offload.py::test_all_levers_together_change_no_bit_and_resume": 14,
    "tests/backends/test_parallel.py::test_a_checkpoint_continues_in_another_layout": 22,
    "tests/backends/test_parallel.py::test_every_axis_and_combination_equals_one_rank": 16,
    "tests/backends/test_value_head.py::test_a_critic_of_any_layout_equals_one_rank": 20,
    "tests/cli/test_wheel.py::test_the_demo_of_a_wheel_trains": 18,
    "tests/convert/test_megatron.py::test_families_load_in_another_layout_and_come_back_from_what_is_saved_there": 16,
    "tests/reshard/test_weight_sync.py::test_the_engine_is_the_one_that_read_the_weights_from_disk": 22,
    "tests/slurm/test_rollout_jobs.py::test_a_rollout_job_is_preempted_and_comes_back": 72,
    "tests/slurm/test_submit.py::test_a_real_run_is_saved_cancelled_and_resumed": 52,
    "tests/trainer/fsdp/test_parts.py::test_a_run_with_every_part": 26,
    "tests/trainer/fsdp/test_resume.py::test_killed_runs_resume_bit_equal": 22,
    "tests/trainer/test_first_rl_step.py::test_loss_and_gradient_norm_equal_one_rank": 18,
    "tests/trainer/test_judge_loop.py::test_judges_compute_what_the_models_beside_the_actor_do": 16,
    "tests/trainer/test_lost_engines.py::test_training_goes_on_without_an_engine_which_comes_back": 26,
    "tests/trainer/test_resume.py::test_killed_runs_resume_bit_equal": 36,
    "tests/trainer/test_sampling.py::test_full_steps_of_groups_with_advantages_and_tools": 22,
    "tests/trainer/test_updates.py::test_every_axis_learns_what_one_rank_learns": 18,
    "tests/trainer/test_separate.py::test_staleness_0_equals_a_colocated_run": 16,
}
# Increase over the table that fails a run: of all functions together, of one above so many seconds.
_TOTAL_INCREASE, _INCREASE, _DEAR = 1.25, 2.0, 5.0
# Wall seconds of a lane of `make test`. Only further functions on the page of capabilities raise it.
_LANE, _MAX_LANE, _FUNCTIONS, _PER_FUNCTION = 650.0, 850.0, 132, 6.0


@dataclass(frozen=True)
class Row:
    """One test function in a tier: markers of resources, number of cases that were not skipped, wall and CPU seconds
    including fixtures."""

    tier: str
    function: str  # tests/x/test_y.py::test_z
    resources: str  # ranks+vllm
    cases: int
    seconds: float
    cpu: float

    @property
    def file(self) -> str:
        return self.function.partition("::")[0]

    @property
    def key(self) -> tuple[str, str]:
        return self.tier, self.function

    @property
    def limit(self) -> float:
        """Maximum CPU seconds of a function of `make test`."""
        return OWN_LIMITS.get(self.function, _SLURM_FUNCTION if "slurm" in self.resources else _FUNCTION)


@dataclass(frozen=True)
class Measured:
    """A run: functions that it ran, all (tier, function) pairs in the files that it collected, CPU seconds of its fixed
    work, and number of tests that its time limit left out."""

    rows: list[Row]
    collected: set[tuple[str, str]]
    work: float
    left: int = 0

    def at_speed(self, work: float) -> Measured:
        """The same run on a machine that takes so many CPU seconds for the fixed work; wall seconds follow these."""
        speed = work / self.work
        rows = [dataclasses.replace(row, seconds=row.seconds * speed, cpu=row.cpu * speed) for row in self.rows]
        return dataclasses.replace(self, rows=rows, work=work)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"rows": list(map(dataclasses.astuple, self.rows)), "collected": sorted(self.collected)}
        path.write_text(json.dumps({**document, "work": self.work, "left": self.left}), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Measured:
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            [Row(*row) for row in found["rows"]], set(map(tuple, found["collected"])), found["work"], found["left"]
        )


def read_table(path: Path = TABLE) -> list[Row]:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[2:]]
    return [Row(*texts, int(cases), float(seconds), float(cpu)) for *texts, cases, seconds, cpu in rows]


def recorded_work(path: Path = TABLE) -> float:
    """CPU seconds of the fixed piece of work on the machine that measured the table."""
    with path.open(encoding="utf-8") as table:
        return float(table.readline().removeprefix(_WORK))


def write_table(rows: Iterable[Row], work: float, path: Path = TABLE) -> None:
    ordered = sorted(rows, key=lambda row: (TIERS.index(row.tier), row.function))
    lines = [
        "\t".join(map(str, (*row.key, row.resources, row.cases, f"{row.seconds:.2f}", f"{row.cpu:.2f}")))
        for row in ordered
    ]
    path.write_text("\n".join([f"{_WORK}{work:.2f}", "\t".join(_HEADER), *lines]) + "\n", encoding="utf-8")


def merged(table: Iterable[Row], runs: Sequence[Measured]) -> list[Row]:
    """The table updated with runs, without functions that are gone from the files that the runs collected.

    A function that changed its tier keeps the seconds of its former one until a run measures it.
    """
    table = list(table)
    collected = {key for run in runs for key in run.collected}
    files = {function.partition("::")[0] for _, function in collected}
    kept = {row.key: row for row in table if row.file not in files or row.key in collected}
    for key in collected - kept.keys():
        former = [row for row in table if row.function == key[1] and row.key not in collected]
        if former:
            kept[key] = dataclasses.replace(former[0], tier=key[0])
    measured = {row.key: row for run in runs for row in run.rows if row.cases or row.key not in kept}
    return list((kept | measured).values())


def named_functions(page: Path = CAPABILITIES) -> set[str]:
    """Test functions that the page of capabilities names."""
    return set(re.findall(r"`(tests/\S+\.py::\w+)`", page.read_text(encoding="utf-8")))


def lane_budget(named: int) -> float:
    """Maximum wall seconds of a lane of `make test`, by the number of functions on the page of capabilities."""
    return min(_MAX_LANE, _LANE + _PER_FUNCTION * max(0, named - _FUNCTIONS))


def outgrown(table: Iterable[Row], run: Measured, factor: float) -> list[str]:
    """Reasons to fail a run: functions without a row, too many CPU seconds of one or of all together.

    ``factor``: slowdown of this machine relative to the table's.
    """
    known = {row.key: row for row in table}
    missing = sorted(row.function for row in run.rows if row.key not in known)
    found = [f"{name} has no row: make durations ARGS='--only {name.partition('::')[0]}'" for name in missing]
    rows = [row for row in run.rows if row.key in known]
    total, recorded = sum(row.cpu for row in rows), sum(known[row.key].cpu for row in rows)
    if total > _TOTAL_INCREASE * factor * recorded:
        found.append(f"all functions took {total:.0f} CPU seconds, recorded: {recorded:.0f}")
    return found + [
        f"{row.function} took {row.cpu:.1f} CPU seconds, recorded: {known[row.key].cpu:.1f}"
        for row in rows
        if row.cpu > factor * max(_DEAR, _INCREASE * known[row.key].cpu)
    ]


def lanes(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Both lanes: files of equal total duration. Clusters are in the second only.

    Warm processes take memory and start slowly. The second lane has them only if ranks take more than half of the time;
    then it has the files that are last by name, so that few fixtures of a session are needed in both.
    """
    files = _groups(rows, lambda row: row.file)
    half = sum(map(_seconds, files)) / 2
    found: tuple[list[Row], list[Row]] = ([], [])
    loads = [0.0, 0.0]
    clusters = [file for file in files if _needs(file, "slurm")]
    ranks = sorted((f for f in files if _needs(f, "ranks", "vllm") and f not in clusters), key=lambda f: f[0].file)
    others = sorted((f for f in files if f not in clusters and f not in ranks), key=_seconds, reverse=True)
    for file in [*clusters, *ranks, *others]:
        fits = file in ranks and loads[0] + _seconds(file) <= half
        lane = 0 if file not in clusters and (fits or loads[0] <= loads[1]) else 1
        loads[lane] += _seconds(file)
        found[lane].extend(file)
    return found


def parts(rows: Sequence[Row], seconds: float) -> list[list[Row]]:
    """Parts of equal duration, each of about ``seconds`` in two lanes at most. A long file is split by function."""
    long = {file[0].file for file in _groups(rows, lambda row: row.file) if _seconds(file) > seconds / 2}
    groups = _groups(rows, lambda row: row.function if row.file in long else row.file)
    clusters = [group for group in groups if _needs(group, "slurm")]
    longest = max(_seconds(rows) / 2, sum(map(_seconds, clusters)))
    found: list[list[Row]] = [[] for _ in range(math.ceil(longest / seconds))]
    for kind in (clusters, [group for group in groups if group not in clusters]):
        for group in sorted(kind, key=_seconds, reverse=True):
            min(found, key=_seconds).extend(group)
    return found


def _groups(rows: Iterable[Row], key: Callable[[Row], str]) -> list[list[Row]]:
    return [list(group) for _, group in itertools.groupby(sorted(rows, key=lambda row: (key(row), row.key)), key)]


def _seconds(rows: Iterable[Row]) -> float:
    return sum(row.seconds for row in rows)


def _needs(rows: Iterable[Row], *resources: str) -> bool:
    return any(set(resources) & {*row.resources.split("+")} for row in rows)


def summary(rows: Sequence[Row], most: int = 12) -> str:
    """Time of each tier with its dearest functions, and of both lanes of `make test`."""
    lines = []
    for tier in TIERS:
        own = sorted((row for row in rows if row.tier == tier), key=lambda row: -row.cpu)
        cases, cpu = sum(row.cases for row in own), sum(row.cpu for row in own)
        lines.append(f"{tier}: {cases} tests, {_seconds(own):.0f} s, {cpu:.0f} CPU seconds")
        lines += [f"  {row.cpu:7.1f} {row.seconds:7.1f} s  {row.function} ({row.cases})" for row in own[:most]]
    loads = [_seconds(lane) for lane in lanes(row for row in rows if row.tier in ("check", "test"))]
    budget = lane_budget(len(named_functions()))
    lines.append(f"lanes of make test: {loads[0]:.0f} and {loads[1]:.0f} of {budget:.0f} s")
    return "\n".join(lines)


def record(runs: Iterable[Measured], path: Path = TABLE) -> None:
    """Store measurements in the table. Some files alone get CPU seconds of the machine that measured the others."""
    runs = [run for run in runs if run.collected]
    table, work = read_table(path), recorded_work(path)
    files = {function.partition("::")[0] for run in runs for _, function in run.collected}
    if files >= {row.file for row in table if (ROOT / row.file).exists()} and all(run.rows for run in runs):
        work = statistics.mean(run.work for run in runs)
    else:
        runs = [run.at_speed(work) for run in runs]
    write_table(merged(table, runs), work, path)


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["record"]:
        record(Measured.read(Path(file)) for file in arguments[1:])
    print(summary(read_table()))


if __name__ == "__main__":
    main(sys.argv[1:])
