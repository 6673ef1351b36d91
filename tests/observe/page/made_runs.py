"""Run folders made for tests of the page, up to the size that its figures are for."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.config import yaml12
from rlhpc.core.attempts import Attempt, Verdict
from rlhpc.core.files import write_json
from rlhpc.core.folder import RunFolder

PHASES = (
    "weight_sync",
    "rollout",
    "reward_model",
    "exchange",
    "prepare",
    "log_probs",
    "reference",
    "values",
    "update",
    "other",
)
NAMES = (
    "loss", "grad_norm", "learning_rate", "entropy", "kl", "policy_loss", "clip_fraction", "reward/mean", "reward/std",
    "reward/max", "reward/min", "advantage/zero_fraction", "response/length_mean", "response/length_max",
    "response/truncated_fraction", "perf/step_seconds", "perf/tokens_per_second", "perf/rollout_seconds",
    "perf/update_seconds", "perf/weight_sync_seconds", "perf/log_probs_seconds", "perf/prepare_seconds",
    "memory/cpu_gib_max", "memory/device_gib_max",
)  # fmt: skip
BEGAN = 1.76e9
RANGES = (("response/length", 3.0, 900.0), ("reward", 0.0, 1.0), ("advantage", -2.0, 2.0))


@dataclass(frozen=True)
class Size:
    """Size of a run. ``rare_last``: the last metric is in every fifth step only, as those of validations are."""

    steps: int = 30
    metrics: int = 12
    ranks: int = 4
    samples: int = 12
    timeline: int = 3
    histograms: int = 5
    rare_last: bool = False


LARGE = Size(steps=10_000, metrics=45, ranks=64, samples=500, timeline=60, histograms=1000)


def make_run(
    path: Path, size: Size = Size(), *, name: str | None = None, config: dict[str, Any] | None = None
) -> RunFolder:
    """A run with metrics, samples, a timeline, two attempts with a requeue between them, a checkpoint, an alert and a
    note. The same path has the same numbers."""
    run, chance = RunFolder(path), random.Random(repr(path.name))
    run.create()
    run.config.write_text(yaml12.dump(config if config is not None else _config(name or path.name, size)))
    names = [*NAMES, *(f"user/metric_{number}" for number in range(max(0, size.metrics - len(NAMES))))][: size.metrics]
    begin = '{"phase": "rl", "step": %d, "total_steps": %d, "time": %.3f'
    lines = [begin + "".join(f', "{name}": %.7g' for name in shown) + "}\n" for shown in (names, names[:-1])]
    with open(run.metrics, "w") as file:
        for step in range(1, size.steps + 1):
            level = math.tanh(3 * step / size.steps)
            values = [0.1 * number + level + 0.3 * chance.random() for number in range(len(names))]
            some = size.rare_last and step % 5 > 0
            file.write(lines[some] % (step, size.steps, BEGAN + 10.0 * step, *(values[:-1] if some else values)))
    _lines(run.samples, (_sample(number, size, chance) for number in range(size.samples)))
    _lines(run.timeline, (_timeline(size.steps - back, size.ranks, chance) for back in reversed(range(size.timeline))))
    _lines(run.histograms, _histograms(size, random.Random(f"histograms of {path.name}")))
    _attempts(run, size)
    (run.checkpoints / f"step-{size.steps // 2:08d}").mkdir()
    alert = {"severity": "warn", "rule": "kl_rising", "message": "kl 1.2 > 1", "action": "warn"}
    place = {"time": BEGAN + 5.0 * size.steps, "phase": "rl", "step": size.steps // 2}
    _lines(run.alerts, [{**place, **alert}])
    _lines(run.notes, [{**place, "text": "learning rate looks high"}])
    return run


def _config(name: str, size: Size) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"path": "/models/small"},
        "data": {"train": ["/data/train.jsonl"]},
        "train": {"steps": size.steps},
        "resources": {"ranks_per_node": min(8, size.ranks)},
        "slurm": {"nodes": max(1, size.ranks // 8)},
        "actor": {"parallel": {"tp": min(2, size.ranks)}},
    }


def separate_config(name: str, size: Size) -> dict[str, Any]:
    """Half of the ranks generate, in engines of two."""
    roles = {"placement": "separate", "rollout": {"ranks": size.ranks // 2, "tp": 2}}
    return {**_config(name, size), **roles}


def _sample(number: int, size: Size, chance: random.Random) -> dict[str, Any]:
    words = ["the", "number", "of", "apples", "left", "is", "twelve", "because", "three", "were", "eaten", "so"]
    response = " ".join(chance.choice(words) + str(chance.randrange(100)) for _ in range(200))
    step = (number * 10 // size.samples + 1) * size.steps // 10
    return {
        "step": step, "set": "", "source": "gsm8k", "prompt": f"Question {number}: how many apples are left?",
        "response": response, "expected": str(number), "reward": float(number % 2), "correct": bool(number % 2),
        "truncated": number % 7 == 0,
    }  # fmt: skip


def _timeline(step: int, ranks: int, chance: random.Random) -> dict[str, Any]:
    spans = []
    for _ in range(ranks):
        at, mine = 0.0, []
        for phase in PHASES:
            end = at + chance.uniform(0.2, 2.0)
            mine.append([phase, round(at, 6), round(end, 6), round(chance.uniform(0, 0.3) * (end - at), 6)])
            at = end
        spans.append(mine)
    return {"phase": "rl", "step": step, "time": BEGAN + 10.0 * step, "spans": spans}


def _histograms(size: Size, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Evenly spread over the steps; bins as in a run, empty ones among them."""
    every = max(1, -(-size.steps // max(1, size.histograms)))
    for step in range(1, size.steps + 1, every) if size.histograms else ():
        bells = {name: _bell(30, low + 0.1 * chance.random(), high, chance) for name, low, high in RANGES}
        diffs = {**_bell(16, -7.0, 1.0, chance), "scale": "log10"}
        found = {**bells, "logprob_diff": diffs}
        yield {"phase": "rl", "step": step, "time": BEGAN + 10.0 * step, "histograms": found}


def _bell(bins: int, low: float, high: float, chance: random.Random) -> dict[str, Any]:
    middle = chance.uniform(0.3, 0.7) * bins
    counts = [int(chance.uniform(0.5, 1) * 900 * math.exp(-(((place - middle) / 4) ** 2))) for place in range(bins)]
    return {"low": low, "high": high, "counts": counts, "values": sum(counts)}


def _attempts(run: RunFolder, size: Size) -> None:
    nodes = tuple(f"node{number}" for number in range(max(1, size.ranks // 8)))
    half = size.steps // 2
    for number, begin, saved in ((1, 0.0, -1), (2, 10.0 * half, half)):
        folder = run.attempt(number)
        folder.logs.mkdir(parents=True)
        (folder.logs / "rank-00000.log").write_text("hello\n")
        (folder.logs / "rank-00001.log").write_text("hello\n")
        write_json(folder.record, asdict(Attempt(number, "4711", number - 1, nodes, size.ranks, BEGAN + begin, saved)))
    ended = Verdict(BEGAN + 10.0 * half - 1, "bad_node", "the GPU has fallen off the bus", "requeue", 1, nodes[0])
    write_json(run.attempt(1).verdict, asdict(ended))
    write_json(run.attempt(2).verdict, asdict(Verdict(BEGAN + 10.0 * size.steps + 5, "finished", "", "none")))


def _lines(path: Path, records: Any) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
