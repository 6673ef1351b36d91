"""Losses of tokens and their slopes by the tokens' log-probs in float64, with the source of each formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlhpc.config.algorithm import AlgorithmSection, RolloutCorrectionSection


@dataclass
class Token:
    """A token that is trained on: natural log-probs under four distributions, and its advantage."""

    log_prob: float  # now
    old: float  # before the step's first update
    engine: float  # when it was sampled
    reference: float | None
    advantage: float
    entropy: float  # of the distribution that it is one of, now


@dataclass
class Term:
    """Loss of a token, and its derivative by the token's log-prob."""

    loss: float
    slope: float
    clipped: bool
    dual_clipped: bool = False


def bounded_exp(log_ratio: float) -> float:
    """exp, bounded as in verl: |log ratio| is at most 20."""
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def clip(ratio: float, section: AlgorithmSection) -> float:
    """Ratio within [1 - clip_low, 1 + clip_high]: DAPO, Yu et al. 2025 (arXiv 2503.14476), equation 10."""
    return min(max(ratio, 1 - section.clip_low), 1 + section.clip_high)


def pessimistic(ratio: float, token: Token, section: AlgorithmSection) -> Term:
    """-min(ratio A, clip(ratio) A): Schulman et al. 2017 (arXiv 1707.06347), equation 7. The clipped branch does not
    depend on the log-prob."""
    free, clipped = ratio * token.advantage, clip(ratio, section) * token.advantage
    if clipped < free:
        return Term(-clipped, 0.0, clipped=True)
    return Term(-free, -free, clipped=False)


def surrogate(tokens: list[Token], section: AlgorithmSection) -> list[Term]:
    """PPO's surrogate of each token; with dual clip at least dual_clip A where A is negative: Ye et al. 2020 (arXiv
    1912.09729), equation 5."""
    terms = []
    for token in tokens:
        term = pessimistic(bounded_exp(token.log_prob - token.old), token, section)
        if section.dual_clip is not None and token.advantage < 0 and term.loss > -section.dual_clip * token.advantage:
            term = Term(-section.dual_clip * token.advantage, 0.0, term.clipped, dual_clipped=True)
        terms.append(term)
    return terms


def gspo(tokens: list[Token], section: AlgorithmSection) -> list[Term]:
    """Every token has its response's ratio, the geometric mean of its tokens' ratios: Zheng et al. 2025 (arXiv
    2507.18071), equations 7 and 14."""
    if not tokens:
        return []
    ratio = math.exp(min(sum(token.log_prob - token.old for token in tokens) / len(tokens), 10.0))
    return [pessimistic(ratio, token, section) for token in tokens]


def cispo(tokens: list[Token], section: AlgorithmSection) -> list[Term]:
    """-sg(clip(ratio)) A log pi: MiniMax 2025 (arXiv 2506.13585), equations 4 and 5."""
    terms = []
    for token in tokens:
        ratio = bounded_exp(token.log_prob - token.old)
        weight = clip(ratio, section)
        terms.append(Term(-weight * token.advantage * token.log_prob, -weight * token.advantage, ratio != weight))
    return terms


LOSSES: dict[str, Callable[[list[Token], AlgorithmSection], list[Term]]] = {
    "grpo": surrogate,
    "dr_grpo": surrogate,
    "dapo": surrogate,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": surrogate,
    "reinforce_plus_plus": surrogate,
    "reinforce_plus_plus_baseline": surrogate,
    "remax": surrogate,
    "ppo": surrogate,
}


def corrections(tokens: list[Token], section: RolloutCorrectionSection) -> list[tuple[float, bool]]:
    """(weight, whether a bound changed it) of each token: the trainer's over the engine's probability of the token, or
    of the whole response. truncate: Yao et al. 2025 (TIS); mask: IcePop, Ling team 2025 (arXiv 2510.18855), equation 5.
    """
    if section.method == "none":
        return [(1.0, False)] * len(tokens)
    whole = bounded_exp(sum(token.old - token.engine for token in tokens))
    found = []
    for token in tokens:
        ratio = whole if section.level == "sequence" else bounded_exp(token.old - token.engine)
        if section.method == "truncate":
            found.append((min(ratio, section.high), ratio > section.high))
        elif section.low <= ratio <= section.high:
            found.append((ratio, False))
        else:
            found.append((0.0, True))
    return found


def kl_term(log_prob: float, reference: float, estimator: str) -> tuple[float, float]:
    """Estimate of KL(policy, reference) at a token, and its slope: Schulman 2020
    (http://joschu.net/blog/kl-approx.html). k3 is bounded by 10, as in verl."""
    difference = log_prob - reference
    if estimator == "k1":
        return difference, 1.0
    if estimator == "k2":
        return difference**2 / 2, difference
    ratio = math.exp(-difference)
    estimate = ratio + difference - 1
    return (estimate, 1 - ratio) if estimate <= 10 else (10.0, 0.0)


def value_term(value: float, old: float, target: float, bound: float | None) -> Term:
    """Half the squared error, the larger of that with and without the clip around the old value: Schulman et al. 2017
    in their code (baselines, ppo2)."""
    error = (value - target) ** 2
    if bound is None:
        return Term(error / 2, value - target, clipped=False)
    near = min(max(value, old - bound), old + bound)
    if (near - target) ** 2 > error:
        return Term((near - target) ** 2 / 2, 0.0, clipped=True)
    return Term(error / 2, value - target, clipped=False)


def token_weights(lengths: list[int], aggregation: str, constant: int) -> tuple[list[float], float]:
    """(weight of a token of each response, denominator) of a minibatch over all ranks.

    token-mean: DAPO, equation 8. sequence-mean: GRPO, equation 3. constant: Dr. GRPO, section 3.2. Responses without
    a trained token do not count.
    """
    responses = 0
    for length in lengths:
        responses += length > 0
    if aggregation == "token-mean":
        return [1.0] * len(lengths), float(sum(lengths)) or 1.0
    if aggregation == "sequence-mean":
        return [1.0 / length if length else 1.0 for length in lengths], float(responses) or 1.0
    return [1.0] * len(lengths), float(responses * constant) or float(constant)
