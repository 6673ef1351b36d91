"""When an engine guesses, and which guesses are accepted."""

from __future__ import annotations

import torch

from rlhpc.config.rollout import SpeculativeSection
from rlhpc.rollout.speculation import Speculation, accepted_guesses
from rlhpc.rollout.vllm_statistics import guess_metrics


def speculation() -> Speculation:
    return Speculation(SpeculativeSection(min_acceptance=0.3), window=10, pause=100)


def test_guesses_stop_for_twice_as_long_each_time_that_too_few_are_right() -> None:
    found = speculation()
    pauses = []
    for _ in range(7):
        found.verified(9, 2, 3)
        assert found.guesses, "the window is not full"
        found.verified(1, 0, 1)
        tokens = 0
        while not found.guesses:
            found.generated(1)
            tokens += 1
        pauses.append(tokens)
    assert pauses == [100, 200, 400, 800, 1600, 1600, 1600]


def test_guesses_that_pay_go_on_and_forget_the_last_pause() -> None:
    found = speculation()
    found.verified(10, 2, 2)
    found.generated(100)
    found.verified(10, 3, 2)
    assert found.guesses
    found.verified(10, 2, 2)
    found.generated(99)
    assert not found.guesses
    found.generated(1)
    assert found.guesses


def test_new_weights_end_a_pause() -> None:
    found = speculation()
    for _ in range(2):
        found.verified(10, 0, 2)
        found.restart()
        assert found.guesses
    found.verified(10, 0, 2)
    found.generated(100)
    assert found.guesses, "as after the first time"


def test_metrics_count_what_was_guessed_and_generated() -> None:
    found = speculation()
    found.verified(10, 2, 4)
    found.generated(30)
    found.verified(10, 8, 2)
    found.generated(90)
    counts = vars(found.take())
    assert guess_metrics(counts) == {
        "engine/guesses_paused_mean": 1.0,
        "engine/guess_acceptance_mean": 0.5,
        "engine/accepted_length_mean": 1 + 10 / 6,
    }
    assert guess_metrics(vars(found.take())) == {}
    assert guess_metrics(None) == {}


def test_tokens_up_to_the_first_wrong_guess_are_accepted() -> None:
    drawn = torch.tensor([7, 8, 9, 4, 5, 6])
    guessed = torch.tensor([7, 8, 9, 0, 5, 1])
    following = torch.tensor([10, 11, 12, 13])
    found = accepted_guesses(drawn, guessed, following, [3, 0, 2, 1])
    assert found.tolist() == [[7, 8, 9, 10], [11, -1, -1, -1], [4, -1, -1, -1], [6, -1, -1, -1]]
