"""State on disk, decisions from it, tables of parts, the name of the page, and the command line."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.acceptance.__main__ import main
from bench.acceptance.driver import PARTS, Options, decide, select
from bench.acceptance.machine import Fingerprint
from bench.acceptance.page import page_name, render_page
from bench.acceptance.results import (
    Figure,
    Goal,
    Part,
    PartRecord,
    Results,
    Status,
    json_schema,
    read_results,
    write_results,
)
from rlhpc.core.errors import UserError

PART = Part("decode", "Decoding", "first", 3.0, "x:y", needs_gpu=False)
H100 = Fingerprint(
    gpu="NVIDIA H100 80GB HBM3",
    gpu_count=1,
    gpu_memory_gib=79.6,
    cpu="Xeon",
    cpu_cores=16,
    cpu_memory_gib=128.0,
    system="Linux 6.1",
    python="3.12.1",
    packages={"torch": "2.11.0+cu130"},
)
CPU = H100.model_copy(update={"gpu": None, "gpu_count": 0, "gpu_memory_gib": None})


def record(status: Status = "passed", **changes: object) -> PartRecord:
    fields = {"title": "Decoding", "tier": "first", "size": "full", "machine": H100.key, "started": 1_763_800_000.0}
    return PartRecord(**{**fields, "status": status, "limit_minutes": 3.0, "seconds": 61.0, **changes})


def results(**parts: PartRecord) -> Results:
    return Results(machines={H100.key: H100, CPU.key: CPU}, parts=parts)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    found = record()
    found.add(Figure("tokens", 1234.5, "1/s", Goal(">=", 1000.0), "graphs on"))
    found.add(Figure("equal", True, "", Goal("==", True)))
    found.add(Figure("tokens", 1300.0, "1/s"))
    assert [figure.value for figure in found.figures] == [1300.0, True], "a figure reported again replaces the first"
    write_results(tmp_path / "state", results(decode=found))
    assert read_results(tmp_path / "state") == results(decode=found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no state: Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ("[]", "no state: Input should be an object"),
        ('{"schema_version": 7}', "schema_version: Input should be 1"),
        ('{"schema_version": 1, "parts": {"a": {}}}', "parts.a.title: Field required"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "acceptance.json"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        read_results(file)
    assert str(raised.value) == f"{file}: {message}; restore the file, or give another folder"


def test_the_schema_describes_every_field() -> None:
    schema = json.loads(json_schema())
    assert schema["properties"]["schema_version"]["const"] == 1
    assert {"Figure", "PartRecord", "Fingerprint"} <= schema["$defs"].keys()
    figure = schema["$defs"]["Figure"]["properties"]
    assert figure["met"]["description"] == "True if the goal is met; null without a goal. NaN never meets one."


@pytest.mark.parametrize(
    ("status", "options", "decision"),
    [
        (None, Options(), "run"),
        ("passed", Options(), "done"),
        ("passed", Options(names=("decode",)), "run"),
        ("passed", Options(retry=True), "done"),
        ("failed", Options(), "failed"),
        ("timeout", Options(), "failed"),
        ("timeout", Options(retry=True), "run"),
        ("failed", Options(names=("decode",)), "run"),
        ("interrupted", Options(), "run"),
        ("skipped", Options(), "run"),
        (None, Options(minutes=12.9), "no_time"),
        (None, Options(minutes=13.0), "run"),
    ],
)
def test_what_is_done_with_a_part(status: Status | None, options: Options, decision: str) -> None:
    before = None if status is None else record(status)
    assert decide(PART, before, options, "full", on_gpu=True, elapsed_minutes=10.0) == decision


def test_full_sizes_count_for_tiny_ones_and_not_the_other_way() -> None:
    tiny = record(size="tiny")
    assert decide(PART, tiny, Options(), "full", on_gpu=True, elapsed_minutes=0.0) == "run"
    assert decide(PART, tiny, Options(), "tiny", on_gpu=True, elapsed_minutes=0.0) == "done"
    assert decide(PART, record(), Options(), "tiny", on_gpu=False, elapsed_minutes=0.0) == "done"
    assert decide(replace(PART, needs_gpu=True), None, Options(), "tiny", on_gpu=False, elapsed_minutes=0.0) == "no_gpu"


def test_an_unknown_part_is_refused_with_its_nearest() -> None:
    assert [part.name for part in select(PARTS, ["demo", "install"])] == ["install", "demo"], "in the table's order"
    with pytest.raises(UserError, match=r"^--part: no part 'weigth_sync'; did you mean 'weight_sync'\?$"):
        select(PARTS, ["weigth_sync"])


def test_a_page_is_named_by_machine_and_day_of_the_newest_part() -> None:
    assert page_name(results(decode=record())) == "gpu-nvidia-h100-80gb-hbm3-2025-11-22.md"
    later = record(machine=CPU.key, started=1_763_900_000.0)
    assert page_name(results(demo=later, decode=record())) == "gpu-cpu-2025-11-23.md"
    assert H100.model_copy(update={"gpu_count": 8}).slug == "8-x-nvidia-h100-80gb-hbm3"


def test_parts_of_two_machines_keep_their_own() -> None:
    found = results(decode=record(), other=record(machine=CPU.key, size="tiny"))
    text = render_page(found, [PART, replace(PART, name="other")], "log")
    assert text.startswith("# Acceptance on NVIDIA H100 80GB HBM3 and Xeon, 2025-11-22\n")
    assert f"passed in 61 s of at most 180 s, full sizes, on `{H100.key}`" in text
    assert f"passed in 61 s of at most 180 s, tiny sizes, on `{CPU.key}`" in text
    assert "| torch | 2.11.0+cu130 |" in text


def test_the_page_has_the_planner_s_lines_of_a_gpu() -> None:
    found = record()
    found.add(Figure("8b: engine asleep", 1.25, "GiB"))
    assert "    sleeping_engine_gib: 1.25\n" in render_page(results(weight_sync=found), [PART], "log")
    tiny = found.model_copy(update={"size": "tiny"})
    assert "sleeping_engine_gib" not in render_page(results(weight_sync=tiny), [PART], "log")


def test_output_of_a_part_cannot_break_the_page() -> None:
    failed = record("failed", message="bad | news", tail=["```", "| a |\x1b[31m", "# not a heading"])
    text = render_page(results(decode=failed), [PART], "log")
    assert "**decode: failed.** bad \\| news" in text
    assert "    ```\n    | a |�[31m\n    # not a heading" in text


def test_the_command_line_lists_parts_and_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [part.name for part in PARTS]
    assert main(["--schema"]) == 0
    assert capsys.readouterr().out == json_schema()
    assert main(["--list", "--json", "--part", "demo"]) == 0
    assert [part["name"] for part in json.loads(capsys.readouterr().out)] == ["demo"]
    assert main(["out", "--part", "weigth_sync"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for wrong in ([], ["out", "--json"], ["out", "--minutes", "soon"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2


ROOT = Path(__file__).parents[3]
# Half an hour on a bare machine: pieces are brought there first (tools/pieces/README.md), then a tier runs.
PIECES_MINUTES = 1.5  # 0.6 on an H100: docs/measurements/2026-11-h100.md
TIER_MINUTES = {"first": 27.0, "rest": 26.0}
LONGEST_MINUTES = 8.0  # per part


def function_arguments(part: Part) -> list[str]:
    """Arguments of a part's function, read from its file because an import would load torch."""
    module, _, name = part.function.partition(":")
    file = ROOT / (module.replace(".", "/") + ".py")
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [argument.arg for node in functions if node.name == name for argument in node.args.args]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_s_function_takes_a_context(part: Part) -> None:
    assert function_arguments(part) == ["context"]


@pytest.mark.parametrize("tier", TIER_MINUTES)
def test_a_tier_fits_into_half_an_hour_on_a_bare_machine(tier: str) -> None:
    minutes = [part.minutes for part in PARTS if part.tier == tier]
    assert sum(minutes) + PIECES_MINUTES <= TIER_MINUTES[tier]
    assert max(minutes) <= LONGEST_MINUTES


def test_the_first_tier_comes_first_and_names_are_unique() -> None:
    tiers = [part.tier for part in PARTS]
    assert tiers == sorted(tiers, key=list(TIER_MINUTES).index)
    assert len({part.name for part in PARTS}) == len(PARTS)
