"""What the page reads from run folders and how it packs it, without a browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import sys
from array import array
from pathlib import Path

import pytest

from rlhpc.cli.plan_run import prediction
from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder
from rlhpc.observe.page.collect import page_data
from rlhpc.observe.page.document import SCRIPTS, STYLES, UPLOT, checksum, document, write_own_page, write_page
from rlhpc.observe.page.marks import link
from rlhpc.observe.page.numbers import (
    LEAST_BINS,
    MOST_BINS,
    Numbers,
    bins_for,
    pack_texts,
    pack_timeline,
    read_steps,
    thinned,
)
from rlhpc.observe.page.tables import pack_settings
from rlhpc.observe.page.texts import MOST_SAMPLES, longest_text
from rlhpc.observe.training_samples import encoded, file_of
from tests.observe.page.made_runs import BEGAN, Size, make_run, separate_config

ROOT = Path(__file__).parents[3]


def unpacked(page: str, name: str) -> bytes:
    """Contents of one of the page's two data elements."""
    return gzip.decompress(base64.b64decode(re.search(rf'id="{name}">([^<]*)<', page)[1]))


def test_thinning_keeps_the_least_and_the_greatest_of_each_bin():
    values = array("d", [math.sin(number) for number in range(10_000)])
    values[4321], values[4322], values[77] = 9.0, -9.0, math.nan
    kept, middles, means = thinned(values, 500)
    assert {4321, 4322} <= set(kept)
    assert 77 not in kept
    assert kept == sorted(kept)
    assert (len(kept) <= 1000, len(middles), len(means)) == (True, 500, 500)
    assert means[216] == pytest.approx(sum(values[4320:4340]) / 20)
    assert [values[index] for index in kept if 4320 <= index < 4340] == [9.0, -9.0]


def test_a_short_curve_is_whole_without_values_that_are_not_finite():
    kept, middles, means = thinned(array("d", [1.0, math.inf, 2.0, math.nan]), 500)
    assert (kept, middles, means) == ([0, 2], [], [])


def test_many_curves_have_fewer_bins():
    assert (bins_for(0), bins_for(135), bins_for(10**6)) == (MOST_BINS, MOST_BINS, LEAST_BINS)
    assert 200 < bins_for(300) < 300


def test_a_repeated_step_replaces_those_from_it_on(tmp_path):
    lines = [
        {"phase": "rl", "step": step, "time": 1.0, "kl": value}
        for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 9.0))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"phase": "rl", "st')
    column = read_steps(tmp_path / "metrics.jsonl").columns["rl", "kl"]
    assert (list(column.steps), list(column.values)) == ([1, 2], [0.1, 9.0])


def test_numbers_come_back_from_their_planes():
    numbers = Numbers()
    first, second, again = numbers.put([1.5, -2.25]), numbers.put([3.0]), numbers.put([1.5, -2.25])
    assert (first, second, again) == ([0, 2], [2, 1], [0, 2])
    planes = gzip.decompress(base64.b64decode(numbers.packed()))
    found = array("f", b"".join(bytes(planes[plane * 3 + i] for plane in range(4)) for i in range(3)))
    if sys.byteorder == "big":
        found.byteswap()
    assert list(found) == [1.5, -2.25, 3.0]


def test_uplot_is_the_released_one():
    assert {name: checksum(name) for name in UPLOT} == UPLOT


def test_a_changed_library_is_refused(monkeypatch):
    monkeypatch.setitem(UPLOT, "uplot/uPlot.iife.min.js", "0" * 64)
    with pytest.raises(ValueError, match=r"uPlot\.iife\.min\.js differs from uPlot 1\.6\.32"):
        document("", "")


def test_the_policy_allows_the_pages_scripts_and_styles_alone():
    page = document("dGV4dHM=", "bnVtYmVycw==")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    for kind, names in (("script", SCRIPTS), ("style", STYLES)):
        bodies = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        sums = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
        assert len(bodies) == len(names)
        assert " ".join([f"{kind}-src", *(f"'sha256-{each}'" for each in sums)]) in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "://" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def test_events_are_at_the_steps_that_were_done(tmp_path):
    texts, _ = page_data([make_run(tmp_path / "run", Size(steps=30))], tmp_path)
    (run,) = texts["runs"]
    marks = [(texts["kinds"][kind], phase, step) for kind, _, phase, step, _, _ in run["marks"]]
    assert marks == [
        ("attempt", "rl", 0),
        ("requeue", "rl", 14),
        ("attempt", "rl", 15),
        ("alert", "rl", 15),
        ("note", "rl", 15),
        ("end", "rl", 30),
        ("checkpoint", "rl", 15),
    ]
    requeue = run["marks"][1]
    assert requeue[4] == "attempt 1: bad node, rank 1 on node0: the GPU has fallen off the bus; requeue"
    assert requeue[5][0] == ["log of rank 1", "./run/attempts/0001/logs/rank-00001.log"]
    assert (run["began"], run["done"], run["totals"]) == (BEGAN + 10, {"rl": 30}, {"rl": 30})


def test_an_event_of_the_job_is_at_its_time(tmp_path):
    """Before the first step of an attempt, an alert has no step."""
    run = make_run(tmp_path / "run", Size(steps=30))
    run.alerts.write_text(json.dumps({"time": BEGAN + 155, "phase": "", "step": -1, "rule": "requeue"}) + "\n")
    texts, _ = page_data([run], tmp_path)
    alerts = [mark[2:5] for mark in texts["runs"][0]["marks"] if texts["kinds"][mark[0]] == "alert"]
    assert alerts == [["rl", 15, "requeue"]]


def test_ranks_are_on_their_nodes_and_axes(tmp_path):
    texts, numbers = page_data([make_run(tmp_path / "run", Size(ranks=16))], tmp_path)
    placement = texts["runs"][0]["placement"]
    assert (placement["ranks"], placement["nodes"], placement["text"]) == (16, ["node0", "node1"], "tp 2 x dp 8")
    axes = {axis["name"]: axis for axis in placement["axes"]}
    assert {name: axis["size"] for name, axis in axes.items()} == {"tp": 2, "dp": 8}
    begin, count = axes["dp"]["places"]
    assert list(numbers.data[begin : begin + count]) == [rank // 2 for rank in range(16)]


def test_ranks_have_their_roles(tmp_path):
    size = Size(ranks=8)
    texts, numbers = page_data([make_run(tmp_path / "run", size, config=separate_config("run", size))], tmp_path)
    placement = texts["runs"][0]["placement"]
    assert placement["text"] == "4 train, tp 2 x dp 2; 4 generate in 2 engine(s)"
    places = {}
    for axis in placement["axes"]:
        begin, count = axis["places"]
        places[axis["name"]] = list(numbers.data[begin : begin + count])
    assert places == {
        "role": [0, 0, 0, 0, 1, 1, 1, 1],
        "tp": [0, 1, 0, 1, -1, -1, -1, -1],
        "dp": [0, 0, 1, 1, -1, -1, -1, -1],
        "engine": [-1, -1, -1, -1, 0, 0, 1, 1],
    }
    assert placement["axes"][0]["labels"] == ["trainer", "engine"]


def test_judges_have_their_role_and_the_axes_of_their_models(tmp_path):
    size = Size(ranks=8)
    config = {
        **separate_config("run", size),
        "judges": {"ranks": 2},
        "algorithm": {"name": "ppo", "kl": {"coefficient": 0.1}},
        "critic": {"on": "judges", "parallel": {"tp": 1}},
        "reference": {"on": "judges"},
    }
    texts, numbers = page_data([make_run(tmp_path / "run", size, config=config)], tmp_path)
    placement = texts["runs"][0]["placement"]
    assert placement["text"] == "2 train, tp 2 x dp 1; 2 judge; 4 generate in 2 engine(s)"
    axes = {axis["name"]: axis for axis in placement["axes"]}
    places = {name: list(numbers.data[axis["places"][0] :][:8]) for name, axis in axes.items()}
    assert axes["role"]["labels"] == ["trainer", "judge", "engine"]
    assert places["role"] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert places["reference tp"] == [-1, -1, 0, 1, -1, -1, -1, -1]
    assert places["critic dp"] == [-1, -1, 0, 1, -1, -1, -1, -1]


def test_settings_have_their_defaults_and_no_secrets():
    trees = [
        {
            "name": "a",
            "train": {"steps": 5},
            "algorithm": {"gamma": 0.9},
            "prepare": {"arguments": {"api_key": "x" * 20}},
        },
        {"name": "b", "train": {"steps": 5}},
    ]
    rows = {key: values for key, *values in pack_settings(trees)}
    assert rows["train.steps"] == ["required", "5", "5"]
    assert rows["algorithm.gamma"] == ["1.0", "0.9", None]
    assert rows["prepare.arguments.api_key"][1] == "***"


def test_links_are_relative_paths_only(tmp_path):
    assert link(tmp_path / "javascript:alert(1)", tmp_path) == "./javascript%3Aalert%281%29"
    assert link(tmp_path / "a b" / "<x>", tmp_path / "page") == "./../a%20b/%3Cx%3E"


def test_a_run_that_has_not_begun_and_one_with_broken_files_have_a_page(tmp_path):
    empty = RunFolder(tmp_path / "empty").create()
    write_own_page(empty)
    broken = make_run(tmp_path / "broken")
    read = (broken.metrics, broken.samples, broken.timeline, broken.histograms, broken.alerts, broken.notes)
    for file in (*read, broken.config):
        file.write_bytes(b'{"phase": "rl", "step": 1, "spans": [[["x", 1]]], "time": "never"}\n\xff\xfe[1]\nnull\n{"a')
    broken.attempt(1).record.write_text("{}")
    broken.attempt(2).verdict.write_text("[]")
    write_page([empty, broken], tmp_path / "page.html")
    texts = json.loads(unpacked((tmp_path / "page.html").read_text(), "texts"))
    assert [run["name"] for run in texts["runs"]] == ["empty", "broken"]


def test_numbers_that_json_lacks_are_left_out_of_texts():
    packed = pack_texts({"a": [1.5, math.nan, (math.inf, "Infinity")]})
    assert json.loads(gzip.decompress(base64.b64decode(packed))) == {"a": [1.5, None, [None, "Infinity"]]}


@pytest.mark.parametrize("folders", [("x", "y"), ("x/run", "y/run")])
def test_runs_of_one_name_are_told_apart(tmp_path, folders):
    runs = [make_run(tmp_path / folder, name="same") for folder in folders]
    names = [run["name"] for run in page_data(runs, tmp_path)[0]["runs"]]
    assert names == [f"same ({folder})" for folder in folders]


def test_the_newest_steps_of_the_timeline_are_on_the_page_within_a_bound(tmp_path):
    inner, outer = ["update", 1.0, 2.0, 0.5], ["rollout", 0.5, 4.0, 1.0]
    steps = [(1, [outer]), (3, [outer]), (2, [inner, outer, ["odd", 3.0, math.nan, 0.0]]), (3, [inner])]
    with open(tmp_path / "timeline.jsonl", "w") as file:
        for step, spans in steps:
            file.write(json.dumps({"phase": "rl", "step": step, "time": 1.0, "spans": [spans, spans]}) + "\n")
        file.write('{"phase": "rl", "step": 9, "spans": [[[1]]]}\n{"phase": "rl"')
    numbers = Numbers()
    packed = pack_timeline(tmp_path / "timeline.jsonl", numbers, 7)
    assert [step["step"] for step in packed["steps"]] == [2, 3]

    def found(name: str) -> list[float]:
        begin, count = packed["steps"][0][name]
        return list(numbers.data[begin : begin + count])

    assert packed["phases"] == ["update", "rollout"]
    assert (found("counts"), found("kinds")) == ([2, 2], [1, 0, 1, 0])
    unit = packed["steps"][0]["unit"]
    assert [value * unit for value in found("gaps")[:2]] == pytest.approx([0.5, -3.0], abs=unit)
    assert [value * unit for value in found("lasts")[:2]] == pytest.approx([3.5, 1.0], abs=unit)
    assert [value * unit for value in found("waits")[:2]] == pytest.approx([1.0, 0.5], abs=unit)


def test_predictions_are_beside_what_was_measured(tmp_path):
    config = yaml12.parse((ROOT / "configs/ready/qwen2.5-7b-1node.yaml").read_text(), "config")
    config["model"]["path"] = str(ROOT / "configs/ready/models/Qwen2.5-7B")
    config |= {"planning": {"gpu": "h200"}, "name": "planned"}
    run = make_run(tmp_path / "run", Size(steps=5, metrics=24), config=config)
    write_json(run.attempt(2).times, {"start": 90.0, "models": 30.0, "resume": None, "saves": [5.0, 7.0]})
    (found,) = page_data([run], tmp_path)[0]["runs"]
    rows = {name: values for name, *values in found["predicted"]}
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    measured = sorted(record["perf/update_seconds"] for record in records[1:])
    assert rows["update"][2] == pytest.approx((measured[1] + measured[2]) / 2)
    planned = json.loads("\n".join(prediction(load_config(run.config), None, as_json=True)[0]))
    phases = planned["time"]["phases"]
    assert rows["update"][1] == pytest.approx(phases["update"]["seconds"])
    assert rows["rollout"][1] == pytest.approx(phases["rollout"]["seconds"])
    assert rows["checkpoint"][2] == 6.0
    assert rows["GPU memory, peak"][1] > 20
    assert found["prediction"].startswith("Predicted for h200, 8 ranks; the last attempt had 4")


def test_samples_of_training_steps_are_read_and_counted(tmp_path):
    run = make_run(tmp_path / "run", Size(samples=4))
    run.training_samples.mkdir()
    for step in (1, 10, 20):
        rows = [
            {"step": step, "prompt": f"p{i}", "response": "r", "reward": 0.5, "reward/format": 1.0, "advantage": -0.25}
            for i in range(64)
        ]
        file_of(run, step).write_bytes(encoded(rows))
    file_of(run, 30).write_bytes(b"cut short")
    texts, _ = page_data([run], tmp_path)
    taught = [row for row in texts["rows"][0] if row[0] == "training"]
    assert {row[1] for row in taught} == {1, 10, 20}
    assert taught[0][2:] == ["", 0.5, "format 1 | advantage -0.25", "p0", "r", ""]
    assert (len(texts["rows"][0]), texts["runs"][0]["unread"]) == (4 + 3 * 64, 0)
    texts, _ = page_data([run], tmp_path, training=False)
    assert (len(texts["rows"][0]), texts["runs"][0]["unread"]) == (4, 4)


def test_long_texts_share_the_room():
    samples = [{"prompt": "p" * 100, "response": "r" * length} for length in (100, 2000, 9000)]
    assert [longest_text(samples, room) for room in (10**6, 5000, 3400, 10)] == [6000, 2600, 1500, 300]


def test_many_samples_are_the_newest_and_long_texts_are_cut(tmp_path):
    run = make_run(tmp_path / "run", Size(samples=MOST_SAMPLES + 5))
    lines = run.samples.read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), "response": "a" * 5000 + "z" * 5000})
    run.samples.write_text("\n".join(lines) + "\n")
    (rows,) = page_data([run], tmp_path)[0]["rows"]
    assert len(rows) == MOST_SAMPLES
    assert rows[0][5] == "Question 5: how many apples are left?"
    assert re.fullmatch(r"a+\n\[… 4,000 characters …\]\nz+", rows[-1][6])
