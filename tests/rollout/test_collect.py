"""Which prompts an engine answers, with which seeds, and what becomes of its completions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rlhpc.api import Completion, Prompt, Request
from rlhpc.rollout.collect import Sampling, build_requests, collect, plan_requests, request_seed

SAMPLING = Sampling(samples_per_prompt=3, max_tokens=4, temperature=0.9, top_p=0.95, seed=5, step=2)


def prompts(*ids: int) -> list[Prompt]:
    return [Prompt(i, (10 + i, 20 + i), "source", f"answer {i}", {}) for i in ids]


class Echo:
    """An engine whose answer is the request's seed, cut into tokens."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [
            Completion(
                np.array([r.seed % 97, r.seed % 89], dtype=np.int32),
                np.array([-0.5, -0.25], np.float32),
                r.seed % 2 == 1,
            )
            for r in requests
        ]


@pytest.mark.parametrize(("num_prompts", "num_engines"), [(64, 1), (64, 8), (10, 4), (3, 4), (7, 7), (0, 2)])
def test_shares_cover_the_step_in_order_and_evenly(num_prompts, num_engines):
    shares = plan_requests(num_prompts, num_engines).shares
    assert len(shares) == num_engines
    assert [position for share in shares for position in share] == list(range(num_prompts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_seeds_are_fixed_and_spread():
    assert request_seed(0, 0, 0, 0) == 5809880761037817570
    seeds = {request_seed(s, t, p, i) for s in range(3) for t in range(5) for p in range(20) for i in range(8)}
    assert len({seed % 2**32 for seed in seeds}) == 3 * 5 * 20 * 8  # CPU generators keep only 32 bits
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("num_engines", [1, 2, 3, 5])
def test_samples_do_not_depend_on_the_number_of_engines(num_engines):
    step = prompts(4, 9, 4, 7, 1)

    def run(engines: int) -> list[tuple]:
        found = []
        for index in range(engines):
            found += collect(
                Echo(),
                step,
                SAMPLING,
                engine_index=index,
                num_engines=engines,
                weights_version=6,
                score=lambda prompt, completion: prompt.prompt_id + completion.tokens[0] / 100,
            )
        return [(s.prompt_id, s.group_id, s.tokens.tolist(), s.reward, s.truncated) for s in found]

    assert run(num_engines) == run(1)


def test_a_prompt_drawn_twice_in_a_step_gets_new_samples():
    requests = build_requests(prompts(4, 9, 4), range(0, 3), SAMPLING)
    assert len({request.seed for request in requests}) == 9


def test_samples_hold_prompt_response_and_score():
    samples = collect(
        Echo(),
        prompts(4, 9),
        SAMPLING,
        engine_index=1,
        num_engines=2,
        weights_version=6,
        score=lambda prompt, completion: len(prompt.ground_truth) + len(completion.tokens),
    )
    assert [sample.group_id for sample in samples] == [1, 1, 1]
    first = samples[0]
    seed = request_seed(5, 2, 9, 0)
    assert first.tokens.tolist() == [19, 29, seed % 97, seed % 89]
    assert first.tokens.dtype == np.int32
    assert (first.prompt_id, first.prompt_len, first.response_len, first.weights_version) == (9, 2, 2, 6)
    assert first.log_probs.tolist() == [-0.5, -0.25]
    assert first.reward == 10.0


def test_requests_carry_the_sampling():
    (request, *_) = build_requests(prompts(4), range(0, 1), SAMPLING)
    assert request == Request((14, 24), request_seed(5, 2, 4, 0), 4, 0.9, 0.95)
