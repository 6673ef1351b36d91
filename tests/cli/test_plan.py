"""``rlhpc plan``: what it predicts of published models that nobody has here, and of a tiny one by heart."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli.output import seconds_text
from rlhpc.config import yaml12
from rlhpc.core.errors import UserError
from tests.cli.test_main import error_line
from tests.helpers.commands import invoke
from tests.helpers.published import QWEN25_72B

ROOT = Path(__file__).parents[2]
TINY = {
    **QWEN25_72B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
TWO_STAGES = {"tp": 2, "pp": 2}
STEP = {  # of metrics.jsonl
    "phase": "rl",
    "step": 1,
    "response/length_mean": 300.0,
    "rollout/completion_tokens": 300.0 * 640,
    "perf/tokens_per_second": 430.0 * 640 / 50,
    "perf/step_seconds": 50.0,
    "perf/update_seconds": 10.0,
}


def write(folder: Path, model: dict[str, Any], **sections: Any) -> str:
    """A model folder with a config.json and nothing else, and a configuration that names it."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(model))
    config = {"name": "big", "model": {"path": str(folder / "model")}, "train": {"steps": 1}, **sections}
    (folder / "config.yaml").write_text(yaml12.dump(config))
    return str(folder / "config.yaml")


def plan(*arguments: str) -> str:
    done = invoke("plan", *arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def nodes(count: int) -> dict[str, Any]:
    return {"slurm": {"nodes": count}, "resources": {"ranks_per_node": 8}}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """Two nodes of four: training by tp 2 and pp 2, engines of two ranks."""
    sections = {"actor": {"parallel": TWO_STAGES}, "rollout": {"tp": 2}, "reshard": {"bucket_mib": 1}}
    return write(tmp_path, TINY, slurm={"nodes": 2}, resources={"ranks_per_node": 4}, **sections)


def test_layout_batch_and_model_are_outlined(tiny: str) -> None:
    lines = plan("run", tiny).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["layout", "backend", "batch", "model", "time"]
    assert "8 ranks on 2 node(s): training tp 2 x pp 2 x dp 2; rollout 4 engine(s) of tp 2" in lines[0]
    assert lines[1].split() == ["backend", "megatron,", "for", "the", "known", "family", "qwen2"]
    assert "Qwen2ForCausalLM, 4 layers" in lines[3]


READY = str(ROOT / "configs" / "ready" / "qwen2-7b-8gpus.yaml")


def test_a_named_gpu_brings_the_time_of_a_step(tiny: str) -> None:
    assert "name a GPU with --gpu, such as h200" in plan("run", tiny)
    text = plan("run", tiny, "--gpu", "h200")
    assert re.search(
        r"^time +\S+ \S+ a step on 8 x h200, [\d,]+ tokens/s, MFU of updates 0\.\d\d; most of it", text, re.M
    )
    for phase in ("weight sync", "rollout", "reference", "update"):
        assert re.search(rf"^{phase} +[\d.]+ \S+ +\d+%", text, re.M)
    assert "forward and backward" in text  # the memory of each phase


def test_times_in_json_add_up(tiny: str) -> None:
    found = json.loads(plan("run", tiny, "planning.gpu=b200", "--json"))["time"]
    assert found["seconds"] == pytest.approx(sum(phase["seconds"] for phase in found["phases"].values()))
    for phase in found["phases"].values():
        assert phase["seconds"] == pytest.approx(sum(phase["parts"].values()))
        assert phase["limit"] in phase["parts"]


def test_a_thousand_gpus_are_planned_in_two_seconds() -> None:
    """Of this process's own time, imports not counted: the machine may be busy."""
    big = str(ROOT / "configs" / "ready" / "deepseek-v3-671b-96gpus.yaml")
    more = ("slurm.nodes=128", "actor.parallel.pp=16", "actor.parallel.last_stage_layers=1")
    plan("run", big, *more)
    began = time.process_time()
    text = plan("run", big, *more)
    assert time.process_time() - began < 2
    assert "on 1024 x h20" in text


@pytest.mark.heavy
def test_a_search_prints_yaml_that_can_be_pasted() -> None:
    text = plan("search", READY)
    documents = [yaml12.parse(part, "") for part in text.split("---\n")[1:]]
    assert len(documents) == 7
    assert {section for document in documents[:5] for section in document} <= {"actor", "reference", "rollout", "train"}
    assert documents[5]["placement"] == "separate"
    assert documents[6]["train"]["backend"] == "fsdp"
    found = json.loads(plan("search", READY, "--json"))
    assert [
        {name: each[name] for name in document} for each, document in zip(found, documents, strict=True)
    ] == documents
    changes = text.split("---\n")[1].splitlines()[1].removeprefix("# ").split(" ")
    pasted = json.loads(plan("run", READY, *changes, "--json"))
    assert pasted["time"]["seconds"] == pytest.approx(found[0]["seconds"])
    assert max(phase["total"] for phase in pasted["memory"]["phases"].values()) == found[0]["peak_bytes"]
    assert [each["placement"] for each in found] == 5 * ["colocated"] + ["separate", "colocated"]
    separate = text.split("---\n")[6].splitlines()
    pasted = json.loads(plan("run", READY, *separate[1].removeprefix("# ").split(" "), "--json"))
    assert pasted["time"]["seconds"] == pytest.approx(found[5]["seconds"])
    assert pasted["time"]["sides"]["engines"]["ranks"] == documents[5]["rollout"]["ranks"]
    head = [line.removeprefix("# ") for line in text.splitlines()[2:6]]
    assert re.match(r"back end: (megatron|fsdp) is 1\.\d\d x as fast as (megatron|fsdp), ", head[0])
    assert re.match(r"placement: (separate|colocated) is 1\.\d\d x as fast as (separate|colocated); ", head[1])
    assert re.match(r"simulated: colocated [\d.]+ m?s a step; separate [\d.]+ m?s at staleness 1 ", head[2])
    assert head[3].startswith(f"predicted: colocated {seconds_text(found[0]['seconds'])}, separate ")
    assert text.splitlines()[6].startswith("# lend: ")
    assert pasted["time"]["simulated"]["max_staleness"] <= 1


@pytest.mark.heavy
def test_trainers_that_lend_are_planned() -> None:
    tailed = ("planning.response_spread=1", "planning.response_tokens=1000", "rollout.max_response_tokens=8192")
    words = (READY, "rollout.ranks=2", "actor.parallel={tp: 2}", "rollout.gpu_memory_utilization=0.4", *tailed)
    words = (*words, "rollout.max_num_seqs=256")  # fewer slots than requests
    separate, lend = (json.loads(plan("run", *words, f"placement={name}", "--json")) for name in ("separate", "lend"))
    assert separate["engines"] == lend["engines"] == {"count": 1, "tp": 2}, "lent engines are not of the job's own"
    alone, found = separate["time"], lend["time"]
    seconds = found["simulated"]["lend_seconds"]
    assert 0 < seconds < found["simulated"]["step_seconds"] <= alone["simulated"]["step_seconds"]
    assert found["simulated"]["idle_trainers"] <= 0.5 * alone["simulated"]["idle_trainers"]
    assert found["sides"]["engines"]["seconds"] <= alone["sides"]["engines"]["seconds"]
    text = plan("run", *words, "placement=lend")
    assert "which lend 3 engine(s); 2 for rollout 1 engine(s) of tp 2" in text
    assert f"lend      trainers' ranks generate up to {seconds_text(seconds)} of a step, after a weight sync" in text
    assert f"{found['simulated']['idle_trainers']:.0%}" in next(row for row in text.splitlines() if "trainers  " in row)
    never = plan("run", *words, "placement=lend", "asynchrony.costs.lend_seconds=0")
    assert "their ranks never generate" in never


def test_a_search_needs_no_layout_that_suits() -> None:
    text = plan("search", READY, "actor.parallel.tp=3")
    assert "# as configured: cannot run (actor.parallel: tp 3" in text
    assert text.count("---\n# ") == 7, "one with ranks that only generate, one of the other back end"


def test_without_rl_steps_there_is_no_step_to_predict(tmp_path: Path) -> None:
    none = (READY, "train.steps=0")
    assert "is predicted for RL steps, of which there are none" in plan("run", *none)
    assert "time" not in json.loads(plan("run", *none, "--json"))
    calibration = ["calibrate", READY, str(tmp_path), "train.steps=0"]
    for words in (["search", *none], ["search", "--gpus", "8,16", *none], calibration):
        done = invoke("plan", *words)
        assert str(done.exception).startswith(f"rlhpc plan {words[0]}: there are no RL steps to predict")


@pytest.mark.heavy
def test_a_search_over_numbers_of_gpus_is_a_table() -> None:
    rows = [line.split() for line in plan("search", READY, "--gpus", "16,8,6").splitlines()]
    assert [row[0] for row in rows] == ["GPUs", "6", "8", "16"]
    assert " ".join(rows[1]) == "6 - - - - - none: no whole nodes of 8 GPUs"
    assert rows[2][4] == "100%"
    none, one, two = json.loads(plan("search", READY, "--gpus", "6,8,16", "--json"))
    assert none == {"gpus": 6, "fits": False, "shortages": ["no whole nodes of 8 GPUs"]}
    assert (one["scaling"], one["layout"]["ranks"], two["layout"]["ranks"]) == (1.0, 8, 16)
    assert two["scaling"] == pytest.approx(two["tokens_per_second"] / one["tokens_per_second"] / 2)
    assert two["seconds"] < one["seconds"]
    best = json.loads(plan("search", READY, "--json"))[0]
    assert {name: one[name] for name in best} == best, "as a search of its own finds it"


@pytest.mark.heavy
def test_a_run_calibrates_what_is_predicted(tmp_path: Path) -> None:
    step = {
        "phase": "rl",
        "step": 1,
        "response/length_mean": 300.0,
        "rollout/completion_tokens": 300.0 * 640,
        "perf/tokens_per_second": 430.0 * 640 / 50,
        "perf/step_seconds": 50.0,
        "perf/weight_sync_seconds": 1.0,
        "perf/rollout_seconds": 20.0,
        "perf/log_probs_seconds": 4.0,
        "perf/update_seconds": 10.0,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    fewer = "train.prompts_per_step=128"
    text = plan("calibrate", READY, str(tmp_path), fewer)
    found = json.loads(plan("calibrate", READY, str(tmp_path), fewer, "--json"))
    assert found["planning"] == {"prompt_tokens": 130, "response_tokens": 300}
    assert "# of this run, for its config: planning.prompt_tokens=130 planning.response_tokens=300\n" in text
    assert found["efficiency"] == yaml12.parse(text, "")["efficiency"]
    assert found["efficiency"]["phases"].keys() == {"weight_sync", "rollout", "log_probs", "reward_model", "update"}
    site = tmp_path / "site.yaml"
    site.write_text(text)
    phases = json.loads(plan("run", READY, fewer, f"site={site}", "--json"))["time"]["phases"]
    predicted = [phases[name]["seconds"] for name in ("rollout", "weight sync", "update")]
    assert predicted == pytest.approx([20, 1, 10], rel=0.02)


@pytest.mark.heavy
def test_a_run_calibrates_its_start_and_its_disks(tmp_path: Path) -> None:
    """With the printed sections and keys, the plan's start and checkpoint are those that the run measured."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    times = {"start": 71.5, "models": 8.0, "resume": None, "saves": [40.0, 44.0]}
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    (tmp_path / "attempts" / "0001" / "times.json").write_text(json.dumps(times))
    text = plan("calibrate", READY, str(tmp_path))
    found = json.loads(plan("calibrate", READY, str(tmp_path), "--json"))
    assert found["planning"]["start_seconds"] == 71.5
    assert found["disk"] == yaml12.parse(text, "")["disk"]
    assert {name: found["seconds"]["measured"][name] for name in ("start", "models", "save")} == {
        "start": 71.5,
        "models": 8.0,
        "save": 42.0,
    }
    (tmp_path / "site.yaml").write_text(text)
    (line,) = [line for line in text.splitlines() if line.startswith("# of this run, for its config: ")]
    keys = line.partition("config: ")[2].split()
    run = json.loads(plan("run", READY, f"site={tmp_path / 'site.yaml'}", *keys, "--json"))["run"]
    assert run["start"] == pytest.approx(71.5 + 8.0, rel=0.01)
    assert run["write"] == pytest.approx(42.0, rel=0.01)


def test_memory_measured_on_the_site_s_machines_is_in_the_plan(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("gpus: {h100: {context_gib: 3.5, sleeping_engine_gib: 2.5}}\n")
    phases = json.loads(plan("run", READY, f"site={site}", "--json"))["memory"]["phases"]
    assert {parts["libraries"] for parts in phases.values()} == {int(3.5 * 2**30)}
    assert phases["optimizer step"]["engine, asleep"] == int(2.5 * 2**30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("search", "TINY"), "rlhpc plan search: no GPU is named; name one with --gpu or in planning.gpu"),
        (("search", "TINY", "--gpus", "4,8"), "rlhpc plan search: no GPU is named"),
        (("calibrate", "TINY", "x", "--gpu", "h200"), "metrics.jsonl: no finished RL step"),
        (("run", "TINY", "--gpu", "h2000"), "--gpu: no GPU 'h2000' is known; did you mean"),
    ],
)
def test_what_cannot_be_predicted_is_reported(tiny: str, arguments: tuple[str, ...], message: str) -> None:
    done = invoke("plan", *(tiny if word == "TINY" else word for word in arguments))
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)


def test_a_configuration_without_a_command_names_it(tiny: str) -> None:
    line = f"rlhpc: rlhpc plan: {tiny!r} is not a command; write `rlhpc plan run {tiny}`"
    assert error_line("plan", tiny, "--gpu", "h200") == line


def test_a_misspelled_command_names_the_nearest() -> None:
    assert error_line("plan", "serch") == "rlhpc: rlhpc plan: 'serch' is not a command; did you mean 'search'?"
