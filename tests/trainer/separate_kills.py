"""Kills a random rank of separate runs at random moments; each resumed run must equal an undisturbed one.

python -m tests.trainer.separate_kills [--moments 20] [--seed 0] [--large] [--chunks] [--lend]

``--large``: hidden size 1024 in bfloat16, two threads a rank, where the batch of an engine's step
changes bits of log-probs. ``--chunks``: an engine's step takes few tokens, so that prompts, and responses that are
computed again, are split over steps. ``--lend``: trainers' ranks generate too. Before the kills, a second undisturbed
run must equal the first.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rlhpc.core.files import read_json
from rlhpc.data import arithmetic
from tests.helpers.runs import complete, finish, records, run, start
from tests.helpers.tiny_models import make_model
from tests.helpers.waiting import until
from tests.trainer.test_lend import lending
from tests.trainer.test_separate import PROMPTS, last_checkpoint, separate, steps_of

STEPS = 12
CHUNK = 40  # tokens of an engine's step with --chunks, for twelve responses of up to 28 tokens
LARGE = {
    "model__dtype": "bfloat16",
    "resources__threads_per_rank": 2,
    "actor__optimizer__learning_rate": 1e-5,
}


def make_config(folder: Path, *, large: bool, chunks: bool, lend: bool) -> Path:
    """The configuration of a run at staleness 1 that saves after each step."""
    changes: dict[str, Any] = {"checkpoint__every": 1, "checkpoint__keep": 1, **(LARGE if large else {})}
    if chunks:
        changes["rollout__engine"] = {"max_num_batched_tokens": CHUNK}
    config = (lending if lend else separate)(folder, 1, steps=STEPS, **changes)
    if large:
        arithmetic.make(str(folder / "inputs"))
        _enlarge(folder / "inputs" / "model")
    return config


def _enlarge(model: Path) -> None:
    """Replaces config and weights by those of a model of hidden size 1024."""
    vocabulary = read_json(model / "config.json")["vocab_size"]
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
    made = make_model(model.with_name("larger"), "qwen2", 0, vocab_size=vocabulary, head_dim=64, **sizes)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(made / name, model / name)


def disturbed(config: Path, chance: random.Random, seconds: float) -> tuple[str, float]:
    """Kills a rank a random time after a random record and resumes; the moment in words, and the whole time.

    ``seconds``: of a step. A fourth of the moments are before the first step of RL.
    """
    process, rank = start(config), chance.randrange(2)
    records_before = max(0, chance.randrange(-STEPS // 4, STEPS))
    began, folder, later = time.monotonic(), config.parent / "run", chance.uniform(0, 2 * seconds)
    started = folder / "attempts" / "0001" / "exits" / f"rank-{rank:05d}.start.json"

    def taken() -> int:
        return sum(record["phase"] == "rl" and record["step"] > 0 for record in records(folder))

    until(
        lambda: process.poll() is not None or (started.exists() and taken() >= records_before), "a record", seconds=900
    )
    time.sleep(chance.uniform(0, 10.0) if not records_before else later)
    killed, steps = process.poll() is None, taken()
    if killed:
        os.kill(read_json(started)["process"]["pid"], signal.SIGKILL)
    code, output = finish(process)
    assert code == (1 if killed else 0), output
    if killed:
        complete(config, "--resume")
    where = f"rank {rank} after {steps} steps" if killed else "nobody: the run had ended"
    return where, time.monotonic() - began


def _step_seconds(run_dir: Path) -> float:
    return median(r["perf/step_seconds"] for r in records(run_dir) if r["phase"] == "rl" and r["step"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--chunks", action="store_true")
    parser.add_argument("--lend", action="store_true")
    options = parser.parse_args()
    size = {"large": options.large, "chunks": options.chunks, "lend": options.lend}
    chance, wrong = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as name:
        straight, began = make_config(Path(name) / "straight", **size), time.monotonic()
        code, output = run(straight)
        seconds = time.monotonic() - began
        assert code == 0, output
        expected = steps_of(straight.parent), last_checkpoint(straight.parent)
        step = _step_seconds(straight.parent / "run")
        assert expected[1][1] == STEPS * PROMPTS, expected[1][1]
        print(f"undisturbed: {seconds:.1f} s, {STEPS} steps", flush=True)
        again = make_config(Path(name) / "again", **size)
        complete(again)
        equal = (steps_of(again.parent), last_checkpoint(again.parent)) == expected
        wrong += not equal
        print(f"undisturbed again: {'bit-equal' if equal else 'DIFFERS'}", flush=True)
        for moment in range(options.moments):
            config = make_config(Path(name) / str(moment), **size)
            where, taken = disturbed(config, chance, step)
            equal = (steps_of(config.parent), last_checkpoint(config.parent)) == expected
            wrong += not equal
            print(f"{moment + 1:3d}  {where}: {'bit-equal' if equal else 'DIFFERS'}, {taken:.0f} s", flush=True)
            shutil.rmtree(config.parent, ignore_errors=equal)
    print(f"{options.moments + 1 - wrong} of {options.moments + 1} runs bit-equal, every prompt once")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
