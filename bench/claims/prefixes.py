"""Generation with a prefix cache over generation without: groups of samples of long prompts."""

from __future__ import annotations

import random

from bench.claims.common import alternate, done, engine_of, model_of, one_thread
from bench.workload import SEED

PROMPTS, SAMPLES, PROMPT, RESPONSE = 4, 8, 448, 64


def main() -> None:
    one_thread()
    from rlhpc.api import Request

    with model_of("30m") as (workload, folder):
        rng = random.Random(SEED)
        prompts = [tuple(rng.randrange(3, workload.vocab) for _ in range(PROMPT)) for _ in range(PROMPTS)]
        requests = [
            Request(prompt, seed=seed, max_tokens=RESPONSE, temperature=1.0)
            for prompt in prompts
            for seed in range(SAMPLES)
        ]
        engines = {
            name: engine_of(folder, PROMPT + RESPONSE, max_num_seqs=len(requests), prefix_caching=name == "with")
            for name in ("with", "without")
        }

        def generate(name: str) -> None:
            engines[name]._in_flight.forget_prefixes()  # as after each weight sync
            engines[name].generate(requests)

        seconds = alternate({name: lambda name=name: generate(name) for name in engines})
        hits = engines["with"].statistics()["engine/prefix_cache_hit_rate_mean"]
    done(
        "prefix caching",
        "faster, no figure",
        f"**{seconds['without'] / seconds['with']:.1f} times** as fast; {hits:.0%} of the prompts' tokens are found",
        f"32M parameters, {PROMPTS} prompts of {PROMPT} tokens, {SAMPLES} samples each of {RESPONSE}",
    )


if __name__ == "__main__":
    main()
