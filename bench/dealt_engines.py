"""Two real engines by each way of dealing: engine steps over the bound, beside the simulation (``dealing.py``).

    python -m bench.dealt_engines [--out FILE.md]

Lengths as there, of a mean of 30 tokens at most 150; each response gets its length as ``max_tokens``, so that a random
model has them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch.distributed as dist

from bench.dealing import CAP, MEAN, PROMPTS, SAMPLES, WAYS, Work, simulate
from rlhpc.api import Prompt, RunState
from rlhpc.config.rollout import RolloutSection
from rlhpc.rollout.requests import Sampling, Task, blank_draft, share_of
from rlhpc.trainer.roles import EngineRank
from rlhpc.trainer.rollout import Rollout
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.rollout import engines

SHRINK = 33  # real lengths are those of the simulation over this
ENGINES = 2


def short(work: Work) -> Work:
    return Work(np.maximum(1, work.lengths // SHRINK), np.maximum(1, work.earlier // SHRINK))


def tasks_of(work: Work) -> list[Task]:
    tasks = []
    for group in range(PROMPTS):
        prompt = Prompt(group, tuple((7 * i + group) % 190 + 5 for i in range(16)), "", "", {})
        for index in range(SAMPLES):
            own = Sampling(int(work.lengths[group, index]), temperature=1.0, top_p=1.0)
            tasks.append(Task(group, index, prompt, blank_draft(prompt, 0), (1, 0, group, index), sampling=own))
    return tasks


def on_rank(path: Path, waves: tuple[int, ...]) -> list[dict[str, Any]]:
    """Steps and seconds of this rank's engine for each number of responses per place and each way."""
    work = short(Work.drawn(0))
    ratios, mean = work.earlier.mean(1) / work.earlier.mean(), float(work.earlier.mean())
    engine = engines.build(path, max_num_seqs=PROMPTS * SAMPLES // (ENGINES * min(waves)))
    engines.sync(engine, path)
    place, found = EngineRank(dist.get_rank(), ENGINES, 1), []
    for wave in waves:
        slots = PROMPTS * SAMPLES // (ENGINES * wave)
        for way in WAYS:
            section = RolloutSection(max_num_seqs=slots, dealing=way)
            rollout = Rollout(engine, place, section, 0, engines.GoodRewards(), None)  # type: ignore[arg-type]
            dealer = rollout.dealer(RunState(), Sampling(150, 1.0, 1.0), lambda group: float(ratios[group]), mean)
            if way == "equal":  # as many at once as with the others
                dealer.collector._slots = slots
            tasks = tasks_of(work)
            dist.barrier()
            began = time.perf_counter()
            dealer.begin([tasks[i] for i in share_of(len(tasks), ENGINES, place.index)], most=len(tasks) // ENGINES)
            dealer.advance()
            seconds = time.perf_counter() - began
            assert all(
                scored.sample.response_len == work.lengths[scored.group, scored.index]
                for scored in dealer.collector.harvest()
            )
            found.append({"steps": dealer.collector._steps, "seconds": seconds, "moved": dealer.moved})
    engine.shutdown()
    return found


def table() -> str:
    from bench.dealt_engines import on_rank  # ranks cannot import it from the main module

    waves, work = (4, 16), short(Work.drawn(0))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m"
        make_model(path, "qwen3", 0, vocab_size=engines.VOCAB, max_position_embeddings=engines.CONTEXT)
        ranks = run_ranks(on_rank, ENGINES, path, waves)
    lines = ["| per place | dealing | steps / bound | simulated | slowest engine, s | moved |", "| --- " * 6 + "|"]
    cells = iter(zip(*ranks, strict=True))
    for wave in waves:
        slots = PROMPTS * SAMPLES // (ENGINES * wave)
        bound = max(int(work.lengths.max()), int(work.lengths.sum()) / (ENGINES * slots))
        for way in WAYS:
            both = next(cells)
            steps, seconds = (max(rank[name] for rank in both) for name in ("steps", "seconds"))
            simulated = simulate(work, ENGINES, slots, way, known=True).steps
            numbers = f"{steps / bound:.2f} | {simulated / bound:.2f} | {seconds:.1f} | {both[0]['moved']}"
            lines.append(f"| {wave} | {way} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    assert MEAN // SHRINK * CAP <= 150
    text = table()
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
