"""A second turn with a prefix cache over one without: each response goes on after a tool's reply."""

from __future__ import annotations

import random
import time

from bench.claims.common import done, engine_of, model_of, one_thread
from bench.workload import SEED

PROMPTS, SAMPLES, PROMPT, RESPONSE, REPLY, ROUNDS = 4, 8, 448, 64, 16, 3


def main() -> None:
    one_thread()
    from rlhpc.api import Request

    with model_of("30m") as (workload, folder):
        rng = random.Random(SEED)
        prompts = [tuple(rng.randrange(3, workload.vocab) for _ in range(PROMPT)) for _ in range(PROMPTS)]
        reply = tuple(rng.randrange(3, workload.vocab) for _ in range(REPLY))
        first = [Request(prompt, seed, RESPONSE, 1.0) for prompt in prompts for seed in range(SAMPLES)]
        engines = {
            name: engine_of(
                folder, PROMPT + 2 * RESPONSE + REPLY, max_num_seqs=len(first), prefix_caching=name == "with"
            )
            for name in ("with", "without")
        }
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(ROUNDS):
            for name, engine in engines.items():
                engine._in_flight.forget_prefixes()  # as after each weight sync
                answers = engine.generate(first)
                conversations = [(*r.prompt, *a.tokens.tolist(), *reply) for r, a in zip(first, answers, strict=True)]
                second = [Request(c, seed, RESPONSE, 1.0, later_turn=True) for seed, c in enumerate(conversations)]
                began = time.perf_counter()
                engine.generate(second)
                seconds[name].append(time.perf_counter() - began)
        hits = engines["with"].statistics()["engine/turn_cache_hit_rate_mean"]
        faster = min(seconds["without"]) / min(seconds["with"])
    done(
        "prefix caching, across turns",
        "faster, no figure",
        f"**{faster:.1f} times** as fast; {hits:.0%} of the conversations' tokens are found",
        f"the same, after a reply of {REPLY} tokens, {RESPONSE} tokens more",
    )


if __name__ == "__main__":
    main()
