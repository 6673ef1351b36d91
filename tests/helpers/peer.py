"""Random ragged cases, and all results of rlhpc.algo for them by name, to compare with another library.

A case and its results are arrays: per response [B], per token [N] (responses end to end), or a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rlhpc.algo import Estimate, Responses, find_algorithm
from rlhpc.algo.advantages import generalised, group_relative, whiten
from rlhpc.algo.algorithm import owners
from rlhpc.algo.losses import importance_weights, policy_gradient, shares, value_loss
from rlhpc.algo.objective import adapted_coefficient, kl_divergence, objective
from rlhpc.config.algorithm import AlgorithmSection, KLSection, RolloutCorrectionSection

Arrays = dict[str, np.ndarray]

GOLDEN = Path(__file__).parents[1] / "golden" / "peer_algorithms.npz"

CONSTANT = 7  # divisor of the constant-normalized aggregation
GAMMAS = (1.0, 0.97)
GAE = ((1.0, 1.0), (0.99, 0.95))
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
DUAL_CLIP = 3.0
SEQUENCE_BOUNDS = {"clip_low": 0.02, "clip_high": 0.03}
WEIGHT_BOUNDS = {"clip_low": 0.9, "clip_high": 0.5}
AGGREGATIONS = ("token-mean", "sequence-mean", "constant")
CORRECTIONS = {
    f"{method}/{level}": RolloutCorrectionSection(method=method, level=level, low=0.5, high=1.5)
    for method in ("truncate", "mask")
    for level in ("token", "sequence")
}
CLIP_VALUE = 0.2
KL_COEFFICIENT = 0.05
STD_EPSILON = 1e-6
_OF_GROUPS = ("grpo", "dr_grpo", "rloo")
_WHITENED = "advantage/reinforce_plus_plus_baseline"


def make_case(seed: int) -> Arrays:
    """Groups of one to five responses of 1 to 12 tokens; in some cases tokens or whole responses are masked."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, rng.integers(1, 5))
    count = int(sizes.sum())
    lengths = rng.integers(1, 13, count)
    if lengths.sum() < 3:
        lengths[0] = 3
    total = int(lengths.sum())
    mask = (rng.random(total) > rng.choice([0.0, 0.3])).astype(np.float32)
    if mask.sum() < 2:
        mask[:] = 1.0
    kind = rng.integers(3)
    rewards = rng.standard_normal(count) if kind else rng.integers(0, 2, count)
    log_probs = -np.abs(rng.standard_normal(total)) * 2
    near = rng.choice([0.05, 0.5, 3.0])

    def beside(values: np.ndarray, scale: float) -> np.ndarray:
        return values + scale * rng.standard_normal(total)

    values = rng.standard_normal(total)
    case = {
        "lengths": lengths,
        "groups": rng.permutation(np.repeat(np.arange(len(sizes)), sizes)),
        "mask": mask,
        "rewards": rewards,
        "baselines": rng.standard_normal(count),
        "log_probs": log_probs,
        "old_log_probs": beside(log_probs, near),
        "reference_log_probs": beside(log_probs, near),
        "engine_log_probs": beside(log_probs, near),
        "advantages": rng.standard_normal(total),
        "entropy": rng.random(total),
        "values": values,
        "old_values": beside(values, 0.3),
        "returns": rng.standard_normal(total),
        "divergence": np.array(rng.random() * 0.2),
    }
    return {
        name: a.astype(np.int64 if a.dtype.kind == "i" and name != "rewards" else np.float32)
        for name, a in case.items()
    }


def is_fit(case: Arrays) -> bool:
    """True if the other library accepts the case: it fails if no token has a non-zero correction weight."""
    corrections = _terms({name: torch.from_numpy(np.asarray(array)) for name, array in case.items()})
    return all(bool(corrections[f"correction/{name}"].any()) for name in CORRECTIONS)


def store(cases: Sequence[tuple[Arrays, Arrays]], versions: dict[str, str]) -> None:
    """Store cases with another library's results: all numbers in one array, in the order of names and shapes."""
    arrays = [[{name: np.asarray(array) for name, array in part.items()} for part in case] for case in cases]
    shapes = [[{name: list(array.shape) for name, array in part.items()} for part in case] for case in arrays]
    flat = [array.ravel().astype(np.float32) for case in arrays for part in case for array in part.values()]
    meta = np.array(json.dumps({"versions": versions, "shapes": shapes}))
    np.savez_compressed(GOLDEN, meta=meta, numbers=np.concatenate(flat))


def stored() -> tuple[list[tuple[Arrays, Arrays]], dict[str, str]]:
    """Cases, results and versions that ``store`` wrote."""
    file = np.load(GOLDEN)
    meta, numbers, cases = json.loads(str(file["meta"])), file["numbers"], []
    for shapes in meta["shapes"]:
        parts: list[Arrays] = []
        for part in shapes:
            parts.append({})
            for name, shape in part.items():
                size = math.prod(shape)
                taken, numbers = numbers[:size].reshape(shape), numbers[size:]
                parts[-1][name] = taken.astype(np.int64) if name in ("lengths", "groups") else taken
        cases.append((parts[0], parts[1]))
    return cases, meta["versions"]


def ours(case: Arrays) -> Arrays:
    """All results in float32."""
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in case.items()}
    return {
        name: value.numpy() for name, value in {**_advantages(tensors), **_terms(tensors), **_losses(tensors)}.items()
    }


def in_our_convention(case: Arrays, theirs: Arrays) -> Arrays:
    """verl's results where a group of one has no advantage; verl keeps its reward. Without what whitens it together
    with the others."""
    _, index, counts = np.unique(case["groups"], return_inverse=True, return_counts=True)
    alone = np.repeat(counts[index] == 1, case["lengths"])
    found = {**theirs, **{f"advantage/{name}": theirs[f"advantage/{name}"] * ~alone for name in _OF_GROUPS}}
    return found if not alone.any() else {name: value for name, value in found.items() if name != _WHITENED}


def our_advantages(case: Arrays) -> Arrays:
    """Results of advantages only, in the precision of the case."""
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in case.items()}
    return {name: value.numpy() for name, value in _advantages(tensors).items()}


def _advantages(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    penalty = KL_COEFFICIENT * kl_divergence(t["old_log_probs"], t["reference_log_probs"], "k1")
    responses = Responses.of(
        t["rewards"],
        t["groups"],
        t["lengths"],
        mask=t["mask"],
        penalty=penalty,
    )
    responses = replace(responses, baselines=t["baselines"], values=t["values"])

    def named(name: str, **keys: object) -> torch.Tensor:
        section = AlgorithmSection(name=name, **keys)
        return find_algorithm(section).advantage(responses, section).advantages

    # Without the KL penalty, because dividing by a small deviation would amplify its rounding.
    plain = Responses.of(t["rewards"], t["groups"], t["lengths"], mask=t["mask"])
    results = {
        "advantage/grpo": plain.spread(group_relative(plain.rewards, plain.groups, STD_EPSILON, normalise_std=True)),
        "advantage/dr_grpo": named("dr_grpo"),
        "advantage/rloo": named("rloo"),
        "advantage/remax": named("remax"),
        "advantage/reinforce_plus_plus_baseline": named("reinforce_plus_plus_baseline"),
    }
    for gamma in GAMMAS:
        results[f"advantage/reinforce_plus_plus/{gamma}"] = named("reinforce_plus_plus", gamma=gamma)
    for gamma, decay in GAE:
        estimate: Estimate = generalised(responses.token_rewards, t["values"], t["mask"], t["lengths"], gamma, decay)
        results[f"advantage/gae/{gamma}/{decay}"] = whiten(estimate.advantages, t["mask"])
        results[f"returns/gae/{gamma}/{decay}"] = estimate.returns
    return results


def _terms(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Per-token KL and correction weights, and the adapted coefficient."""
    results = {
        f"kl/{estimator}": kl_divergence(t["log_probs"], t["reference_log_probs"], estimator) * t["mask"]
        for estimator in ("k1", "k2", "k3")
    }
    rows = owners(t["lengths"])
    for name, section in CORRECTIONS.items():
        importance = importance_weights(t["old_log_probs"], t["engine_log_probs"], t["mask"], rows, section)
        results[f"correction/{name}"] = importance.weights
    adaptive = KLSection(coefficient=0.1, target=0.05, horizon=1000)
    coefficient = adapted_coefficient(0.1, float(t["divergence"]), len(t["lengths"]), adaptive)
    return {**results, "kl/adapted": torch.tensor(coefficient, dtype=torch.float64)}


def _losses(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each loss in each aggregation, with its gradient by log-probs and its metrics."""
    rows, results = owners(t["lengths"]), {}
    trained = torch.zeros(len(t["lengths"])).index_add_(0, rows, t["mask"])
    names = ("advantages", "old_log_probs", "engine_log_probs", "reference_log_probs", "entropy")
    for aggregation in AGGREGATIONS:
        share = shares([int(length) for length in trained], aggregation, CONSTANT)
        weight = torch.tensor(share.weights)[rows] * t["mask"]
        for name, loss in policy_losses().items():
            log_probs = t["log_probs"].clone().requires_grad_()
            tokens = {**{key: t[key] for key in names}, "log_probs": log_probs, "weight": weight, "sequence": rows}
            value = loss(tokens) / share.denominator
            value.backward()
            results[f"loss/{name}/{aggregation}"] = value.detach()
            results[f"gradient/{name}/{aggregation}"] = log_probs.grad
        critic = value_loss(t["values"], t["returns"], t["old_values"], weight, CLIP_VALUE)
        results[f"loss/value/{aggregation}"] = critic.loss / share.denominator
    return results


def policy_losses() -> dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]]:
    """Loss functions by name, each from an algorithm's section."""

    def of(name: str, **keys: object) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
        section = AlgorithmSection(**{"name": name, "kl": {"coefficient": 0.0, "placement": "reward"}, **keys})
        return lambda tokens: find_algorithm(section).loss(tokens, section)["loss"]

    plain = AlgorithmSection(name="own:PG", kl=KLSection(coefficient=0.0, placement="reward"))
    return {
        "clipped": of("grpo", **BOUNDS),
        "dual_clip": of("grpo", **BOUNDS, dual_clip=DUAL_CLIP),
        "gspo": of("gspo", **SEQUENCE_BOUNDS),
        "cispo": of("cispo", **WEIGHT_BOUNDS),
        "policy_gradient": lambda t: objective(policy_gradient(t["log_probs"], t["advantages"]), t, plain)["loss"],
        "with_kl_and_entropy": of(
            "grpo", **BOUNDS, entropy_coefficient=0.01, kl={"coefficient": KL_COEFFICIENT, "estimator": "k3"}
        ),
        **{f"clipped/{name}": of("grpo", **BOUNDS, rollout_correction=own) for name, own in CORRECTIONS.items()},
    }
