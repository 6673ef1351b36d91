"""Steps of a separate and a colocated run on two ranks, with long-tailed response lengths, against the simulator.

    python -m bench.separate               # staleness 1, 2 and 4, colocated, and lend: nine runs of up to a minute
    python -m bench.separate --steps 20 --folder runs/separate

Megatron trains on one rank, vLLM generates on the other, a thread each; two cores must be idle. Responses have
log-normal lengths of spread 1: end tokens are never sampled, and each request may have as many tokens as the simulator
draws for it. The simulator's constants come from runs before those that are measured, in which one side works at a
time: staleness 0, and another number of sequences. Limits: a step at most 1.10 times the simulated one, and 1.25 times
max(engines with full slots, trainers, (makespan + train + sync) / (staleness + 1)).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from bench.workload import SEED, Workload, write_prompts
from rlhpc.rollout.schedule.generation_load import GenerationLoad, ModelEngine, SampledLengths, colocated, shortest_step
from rlhpc.rollout.schedule.simulator import separate, with_lending

ROOT = Path(__file__).resolve().parent.parent
STALENESS, WARM = (1, 2, 4), 4
SIMULATED, BOUND = 1.10, 1.25
# As on a GPU, a step's time hardly depends on its tokens, so that computing responses again takes a small part of it.
MODEL = Workload("separate", 2, 128, 4, 2, 352, 512, prompt_tokens=(8, 8), max_response=720, hazard=1e-9)
LONG_PROMPT, EPOCHS = 200, 2  # tokens of a prompt where the time for prompts is measured; passes over a step's samples
# Times are guesses until they are calibrated.
LOAD = GenerationLoad(
    1, 16, 4, 16, 5e-3, 1e-4, 2.0, mean_tokens=120, most_tokens=MODEL.max_response, prompt_tokens=MODEL.prompt_tokens[0]
)


def fix_lengths(load: dict[str, Any]) -> None:
    """Ends each response of this process at the length that the simulator draws for it. Called by sitecustomize."""
    from rlhpc.rollout import requests

    lengths, unchanged = SampledLengths(GenerationLoad(**load)), requests.request_of

    def request_of(task: requests.Task, sampling: requests.Sampling) -> Any:
        _, _, prompt, sample = task.root
        most = lengths[prompt][sample] - task.draft.response_len
        return replace(unchanged(task, sampling), max_tokens=most)

    requests.request_of = request_of


def make_inputs(folder: Path, steps: int) -> None:
    """Writes the model, the prompts, and the module that each rank imports at its start."""
    import torch

    from bench.models import build_model, build_tokenizer

    torch.set_num_threads(1)
    build_model(MODEL).save_pretrained(folder / "model")
    build_tokenizer(MODEL).save_pretrained(folder / "model")
    long = replace(MODEL, prompt_tokens=(LONG_PROMPT, LONG_PROMPT))
    for name, model in (("prompts", MODEL), ("long-prompts", long)):
        write_prompts(folder / f"{name}.jsonl", model.prompts(LOAD.groups_per_step * (steps + 8)))


def config_of(folder: Path, load: GenerationLoad, steps: int, most: int | None, lend: float) -> dict[str, Any]:
    """Config of a run; ``most``: its maximum staleness, None for colocated; ``lend``: seconds of a step for which the
    trainer's rank generates, with a lender."""
    config: dict[str, Any] = {
        "name": "bench-separate",
        "seed": SEED,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "resources": {"ranks_per_node": 2, "threads_per_rank": 1},
        "data": {
            "train": [str(folder / ("long-prompts.jsonl" if load.prompt_tokens == LONG_PROMPT else "prompts.jsonl"))],
            "max_prompt_tokens": LONG_PROMPT,
            "shuffle": False,
            "chat_template": False,
        },
        "actor": {"optimizer": {"learning_rate": 1e-8, "weight_decay": 0.0}},
        "rewards": [{"function": "bench.workload:score"}],
        "rollout": {
            "samples_per_prompt": load.samples_per_group,
            "max_response_tokens": load.most_tokens,
            "max_num_seqs": load.slots,
            "kv_cache_gib": 0.25,
            "prefix_caching": False,  # each response computes its own prompt
        },
        "train": {
            "steps": steps,
            "prompts_per_step": load.groups_per_step,
            "tokens_per_microbatch": 2048,
            "epochs": EPOCHS,
        },
        "checkpoint": {"every": 0},
        "observe": {"tensorboard": False, "samples": 0},
    }
    if most is not None:
        costs = {
            "step_seconds": load.step_seconds,
            "sequence_seconds": load.sequence_seconds,
            "train_seconds": load.train_seconds + load.sync_seconds,
        }
        config |= {"placement": "separate", "asynchrony": {"max_staleness": most, "costs": costs}}
        config["rollout"]["ranks"] = 1
        if load.lenders:
            config |= {"placement": "lend"}
            costs["lend_seconds"] = lend
    return config


def run(
    folder: Path, name: str, load: GenerationLoad, steps: int, most: int | None, lend: float = 0.0
) -> list[dict[str, Any]]:
    """Records of the RL steps of a run."""
    place = folder / name
    place.mkdir(parents=True)
    hook = f"from bench.separate import fix_lengths\nfix_lengths({asdict(load)!r})\n"
    (place / "sitecustomize.py").write_text(hook)
    (place / "config.yaml").write_text(yaml.safe_dump(config_of(folder, load, steps, most, lend)))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "rlhpc.cli.main", "run", str(place / "config.yaml")]
    with (place / "log").open("w") as log:
        done = subprocess.run([*command, "--run-dir", str(place / "run")], env=environ, stdout=log, stderr=log)
    if done.returncode:
        sys.exit(f"{name} ended with code {done.returncode}: {place / 'log'}")
    records = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["phase"] == "rl" and record["step"]]


def generation(load: GenerationLoad, step: int) -> tuple[int, int]:
    """Steps and tokens of an engine that generates a batch alone."""
    engine = ModelEngine(load.slots)
    groups = _lengths(load, step)
    for number, lengths in enumerate(groups):
        engine.admit(number, lengths)
    while engine.running:
        engine.advance(engine.until_end())
    return engine.steps, sum(map(sum, groups))


def _lengths(load: GenerationLoad, step: int) -> list[list[int]]:
    lengths, size = SampledLengths(load), load.groups_per_step
    return [lengths[group] for group in range(step * size, (step + 1) * size)]


def check(load: GenerationLoad, records: list[dict[str, Any]], most: int) -> None:
    """Every response has its length, and no token is older than allowed."""
    for record in records:
        expected = generation(load, int(record["step"]) - 1)[1]
        assert record["rollout/completion_tokens"] == expected, (record["step"], expected)
        assert record.get("sampling/staleness_max", 0) <= most, record["step"]


def prompt_runs(folder: Path, steps: int) -> list[tuple[GenerationLoad, list[dict[str, Any]]]]:
    """Runs with responses of one token, of which one has long prompts."""
    loads = [replace(LOAD, mean_tokens=1e-6, prompt_tokens=tokens) for tokens in (MODEL.prompt_tokens[0], LONG_PROMPT)]
    return [(load, run(folder, f"prompts-{load.prompt_tokens}", load, steps, 0)) for load in loads]


def prompt_seconds(runs: list[tuple[GenerationLoad, list[dict[str, Any]]]]) -> float:
    """Seconds of each token of a prompt."""
    short, long = (statistics.median(record["perf/rollout_seconds"] for record in found[1:]) for _, found in runs)
    responses = LOAD.groups_per_step * LOAD.samples_per_group
    return max(0.0, long - short) / (responses * (LONG_PROMPT - MODEL.prompt_tokens[0]))


def calibrated(
    load: GenerationLoad,
    runs: list[tuple[GenerationLoad, list[dict[str, Any]]]],
    short: tuple[GenerationLoad, list[dict[str, Any]]],
    prefill_seconds: float,
) -> GenerationLoad:
    """The load with the constants of runs at staleness 0, in which one side works at a time.

    ``short``: a run with responses of one token. Without it, the sync could have any part of the engine's time: batches
    of one load need nearly equal numbers of steps.
    """
    import numpy as np

    rows, seconds, train, mean = [], [], [], load.groups_per_step * load.samples_per_group * SampledLengths(load).mean
    for one, records in (*runs, short):
        check(one, records, 0)
        for record in records[1:]:  # the first step is slow
            steps, tokens = generation(one, int(record["step"]) - 1)
            rows.append((1.0, steps, tokens))
            seconds.append(record["perf/rollout_seconds"])
            if one is not short[0]:
                train.append((record["perf/step_seconds"] - record["perf/rollout_seconds"]) / tokens * mean)
    columns, measured = np.array(rows), np.array(seconds)
    sync, step, sequence = np.linalg.lstsq(columns, measured, rcond=None)[0]
    if sequence < 0:  # it is small beside the noise
        (sync, step), sequence = np.linalg.lstsq(columns[:, :2], measured, rcond=None)[0], 0.0
    if step <= 0:
        sys.exit("other work disturbed the calibration: an engine's step takes no time")
    return replace(
        load,
        prefill_seconds=prefill_seconds,
        step_seconds=float(step),
        sequence_seconds=float(sequence),
        train_seconds=statistics.median(train),
        sync_seconds=max(0.0, float(sync)),
    )


def show_lending(folder: Path, load: GenerationLoad, steps: int) -> None:
    """Runs at staleness 1 with a trainer's rank that generates while it would wait."""
    lending = replace(load, lenders=1, lend_overhead_seconds=load.switch_seconds)
    found = with_lending(lending, 1, steps=steps, warm=WARM)
    records = run(folder, "lend-1", lending, steps, 1, found.lend_seconds)
    check(load, records, 1)
    idle, lent = (_mean(records, f"trainers/{name}_fraction") for name in ("idle", "lent"))
    print(
        f"\nplacement lend, staleness 1, {found.lend_seconds:.2f} s of virtual time: "
        f"{_mean(records, 'perf/step_seconds'):.2f} s a step ({found.step_seconds:.2f}), idle trainer {idle:.2f} "
        f"({found.idle_trainers:.2f}), generating {lent:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help=f"of a run; the first {WARM} of them do not count")
    parser.add_argument("--calibration", type=int, default=7, help="steps of each of the two runs")
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / time.strftime("bench-separate-%Y%m%d-%H%M%S"))
    options = parser.parse_args()
    folder, steps = options.folder.resolve(), options.steps
    folder.mkdir(parents=True)
    make_inputs(folder, steps)
    loads = (LOAD, replace(LOAD, slots=4))
    alone = [(one, run(folder, f"alone-{one.slots}", one, options.calibration, 0)) for one in loads]
    prompts = prompt_runs(folder, options.calibration)
    load = calibrated(LOAD, alone, prompts[0], prompt_seconds(prompts))
    print(f"engine alone: {load.step_seconds * 1e3:.2f} ms a step, {load.sequence_seconds * 1e3:.3f} ms each sequence")
    print(f"prompts alone: {load.prefill_seconds * 1e6:.0f} us a token")
    print(f"trainer alone: {load.train_seconds:.2f} s a step, {load.sync_seconds:.2f} s from there to new responses")
    both = run(folder, "colocated", load, steps, None)
    check(load, both, 0)
    turns = _mean(both, "perf/step_seconds")
    shared = replace(load, engines=2, train_seconds=load.train_seconds / 2)
    simulated = colocated(shared, steps=steps).step_seconds
    print(f"colocated: {turns:.2f} s a step, simulated {simulated:.2f} s; below, simulated values in brackets\n")
    print("| staleness | step, s | step / simulated | / bound | colocated / separate | idle engine | idle trainer |")
    print("| --- |" + " --- |" * 6)
    missed = False
    for most in options.staleness:
        records = run(folder, f"separate-{most}", load, steps, most)
        check(load, records, most)
        step, found = _mean(records, "perf/step_seconds"), separate(load, most, steps=steps, warm=WARM)
        ratios = (step / found.step_seconds, step / shortest_step(load, most))
        missed |= ratios[0] > SIMULATED or ratios[1] > BOUND
        pairs = (
            (turns / step, simulated / found.step_seconds),
            (_mean(records, "engines/idle_fraction_mean"), found.idle_engines),
            (_mean(records, "trainers/idle_fraction"), found.idle_trainers),
        )
        cells = [f"{value:.2f}" for value in (step, *ratios)] + [f"{ours:.2f} ({its:.2f})" for ours, its in pairs]
        print(f"| {most} | {' | '.join(cells)} |", flush=True)
    show_lending(folder, load, steps)
    print(f"\nload of the machine at the end: {os.getloadavg()[0]:.1f}")
    if missed:
        sys.exit("above the limit")


def _mean(records: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(record.get(name, 0.0) for record in records[WARM:])  # nothing lent: no such number


if __name__ == "__main__":
    main()
