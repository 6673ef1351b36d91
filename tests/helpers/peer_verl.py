"""Compares rlhpc.algo and rlhpc.data.packing with verl 0.9.1's functions. Run where both can be imported:

    python -m venv V && V/bin/pip install --no-deps verl==0.9.1
    V/bin/pip install numpy omegaconf hydra-core packaging 'tensordict<=0.10.0' pandas codetiming cachetools ray \
        transformers==5.5.3 torch==2.13.0 jaxtyping pydantic pyyaml
    V/bin/python -m tests.helpers.peer_verl compare 5000    # differences, by name
    V/bin/python -m tests.helpers.peer_verl compare64 5000  # the same in float64
    V/bin/python -m tests.helpers.peer_verl balance 200     # the fullest part / the mean
    V/bin/python -m tests.helpers.peer_verl golden          # rewrites tests/golden/peer_algorithms.npz
    V/bin/python -m tests.helpers.peer_verl golden-balance  # rewrites tests/golden/peer_balance.npz
"""

from __future__ import annotations

import itertools
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.config import ActorConfig

from rlhpc.data.packing import balance
from tests.helpers import peer
from tests.helpers.peer_balance import GOLDEN as GOLDEN_BALANCE
from tests.helpers.peer_balance import make_batch

VERSIONS = {"verl": "0.9.1", "torch": torch.__version__, "python": platform.python_version()}
GOLDEN_CASES = 24
_AGGREGATIONS = {
    "token-mean": "token-mean",
    "sequence-mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


class Padded:
    """A case as verl accepts it: [B, longest]."""

    def __init__(self, case: peer.Arrays) -> None:
        lengths = torch.from_numpy(case["lengths"])
        self.inside = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        self.case = case
        self.mask = self("mask")

    def __call__(self, name: str) -> torch.Tensor:
        values = torch.from_numpy(self.case[name])
        padded = torch.zeros(self.inside.shape, dtype=values.dtype)
        padded[self.inside] = values
        return padded

    def flat(self, values: torch.Tensor, masked: bool = True) -> np.ndarray:
        return (values * self.mask if masked else values)[self.inside].detach().numpy()

    def token_rewards(self, penalty: bool) -> torch.Tensor:
        """Score at the last token that the policy sampled, or at the last token if it sampled none."""
        scores = torch.zeros_like(self.mask)
        for row, reward in enumerate(self.case["rewards"]):
            places = self.mask[row].nonzero() if self.mask[row].any() else self.inside[row].nonzero()
            scores[row, places[-1]] = float(reward)
        if penalty:
            old, reference = self("old_log_probs"), self("reference_log_probs")
            scores += core_algos.compute_rewards(0.0, old, reference, peer.KL_COEFFICIENT) * self.mask
        return scores


def theirs(case: peer.Arrays) -> peer.Arrays:
    """verl's results by the same names."""
    padded = Padded(case)
    return {**_advantages(padded), **_terms(padded), **_losses(padded)}


def _advantages(p: Padded) -> peer.Arrays:
    index, mask = p.case["groups"], p.mask
    baselines = torch.from_numpy(p.case["baselines"])

    def grpo(rewards: torch.Tensor, std: bool) -> torch.Tensor:
        function = core_algos.compute_grpo_outcome_advantage
        return function(rewards, mask, index, epsilon=peer.STD_EPSILON, norm_adv_by_std_in_grpo=std)[0]

    whole = p.token_rewards(True)
    results = {
        "advantage/grpo": grpo(p.token_rewards(False), True),
        "advantage/dr_grpo": grpo(whole, False),
        "advantage/rloo": core_algos.compute_rloo_outcome_advantage(whole, mask, index)[0],
        "advantage/remax": core_algos.compute_remax_outcome_advantage(whole, baselines, mask)[0],
        "advantage/reinforce_plus_plus_baseline": (
            core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(whole, mask, index)[0]
        ),
    }
    for gamma in peer.GAMMAS:
        function = core_algos.compute_reinforce_plus_plus_outcome_advantage
        found = function(whole, mask, config=SimpleNamespace(gamma=gamma))
        results[f"advantage/reinforce_plus_plus/{gamma}"] = found[0]
    for gamma, decay in peer.GAE:
        found = core_algos.compute_gae_advantage_return(whole, p("values"), mask, gamma, decay)
        results[f"advantage/gae/{gamma}/{decay}"], results[f"returns/gae/{gamma}/{decay}"] = found
    return {name: p.flat(value) for name, value in results.items()}


def _terms(p: Padded) -> peer.Arrays:
    results = {
        f"kl/{estimator}": p.flat(core_algos.kl_penalty(p("log_probs"), p("reference_log_probs"), estimator))
        for estimator in ("k1", "k2", "k3")
    }
    for name, section in peer.CORRECTIONS.items():
        results[f"correction/{name}"] = p.flat(_weights(p, section))
    controller = core_algos.AdaptiveKLController(0.1, 0.05, 1000)
    controller.update(float(p.case["divergence"]), len(p.case["lengths"]))
    return {**results, "kl/adapted": np.array(controller.value)}


def _weights(p: Padded, section: peer.RolloutCorrectionSection) -> torch.Tensor:
    threshold = section.high if section.method == "truncate" else f"{section.low}_{section.high}"
    log_ratio = p("old_log_probs") - p("engine_log_probs")
    return compute_rollout_correction_weights(log_ratio, p.mask, section.level, threshold)[0]


def _losses(p: Padded) -> peer.Arrays:
    results: peer.Arrays = {}
    for aggregation, mode in _AGGREGATIONS.items():
        for name, loss in _policy_losses(p, mode).items():
            log_probs = p("log_probs").requires_grad_()
            value = loss(log_probs)
            value.backward()
            results[f"loss/{name}/{aggregation}"] = value.detach().numpy()
            results[f"gradient/{name}/{aggregation}"] = p.flat(log_probs.grad, masked=False)
        critic = core_algos.compute_value_loss(
            p("values"),
            p("returns"),
            p("old_values"),
            p.mask,
            peer.CLIP_VALUE,
            mode,
            loss_scale_factor=peer.CONSTANT,
        )
        results[f"loss/value/{aggregation}"] = critic[0].numpy()
    return results


def _policy_losses(p: Padded, mode: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    def aggregate(values: torch.Tensor) -> torch.Tensor:
        return core_algos.agg_loss(values, p.mask, mode, loss_scale_factor=peer.CONSTANT)

    def of(
        name: str, bounds: dict[str, float], dual_clip: float = 1e30, weights: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=bounds["clip_low"],
            clip_ratio_high=bounds["clip_high"],
            clip_ratio_c=dual_clip,
        )
        config.global_batch_info["loss_scale_factor"] = peer.CONSTANT
        function = core_algos.get_policy_loss_fn(name)
        return lambda log_probs: function(
            p("old_log_probs"), log_probs, p("advantages"), p.mask, mode, config=config, rollout_is_weights=weights
        )[0]

    clipped = of("vanilla", peer.BOUNDS)

    def with_kl_and_entropy(log_probs: torch.Tensor) -> torch.Tensor:
        divergence = core_algos.kl_penalty(log_probs, p("reference_log_probs"), "k3")
        rest = peer.KL_COEFFICIENT * aggregate(divergence) - 0.01 * aggregate(p("entropy"))
        return clipped(log_probs) + rest

    return {
        "clipped": clipped,
        "dual_clip": of("vanilla", peer.BOUNDS, peer.DUAL_CLIP),
        "gspo": of("gspo", peer.SEQUENCE_BOUNDS),
        "cispo": of("cispo", peer.WEIGHT_BOUNDS),
        "policy_gradient": of("gpg", peer.BOUNDS),
        "with_kl_and_entropy": with_kl_and_entropy,
        **{
            f"clipped/{name}": of("vanilla", peer.BOUNDS, weights=_weights(p, section))
            for name, section in peer.CORRECTIONS.items()
        },
    }


def _fit_seeds() -> Iterator[int]:
    return (seed for seed in itertools.count() if peer.is_fit(peer.make_case(seed)))


def compare(count: int, double: bool = False) -> None:
    """Print the maximum difference of each result over ``count`` cases: absolute, and relative to max(1, |theirs|).

    ``double``: of advantages in float64, as the trainer computes them. Whitening enlarges the rounding of values that
    are almost alike.
    """
    absolute: dict[str, float] = {}
    relative: dict[str, tuple[float, int]] = {}
    beyond: dict[str, int] = {}  # cases that differ by more than 1e-5
    for seed in itertools.islice(_fit_seeds(), count):
        case = peer.make_case(seed)
        if double:
            case = {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in case.items()}
            found, expected = peer.our_advantages(case), _advantages(Padded(case))
        else:
            found, expected = peer.ours(case), theirs(case)
        assert found.keys() == expected.keys()
        for name, value in peer.in_our_convention(case, expected).items():
            difference = np.abs(found[name].astype(np.float64) - value)
            absolute[name] = max(absolute.get(name, 0.0), float(difference.max()))
            scaled = float((difference / np.maximum(1.0, np.abs(value))).max())
            relative[name] = max(relative.get(name, (0.0, 0)), (scaled, seed))
            beyond[name] = beyond.get(name, 0) + (scaled > 1e-5)
    print(f"{count} cases; {', '.join(f'{name} {version}' for name, version in VERSIONS.items())}")
    for name in sorted(absolute):
        scaled, seed = relative[name]
        more = f"  beyond 1e-5 in {beyond[name]}" if beyond[name] else ""
        print(f"{name:48s} absolute {absolute[name]:.1e}  relative {scaled:.1e}  (case {seed}){more}")
    print(f"{'all':48s} absolute {max(absolute.values()):.1e}  relative {max(relative.values())[0]:.1e}")


def fullest(lengths: list[int], parts: list[list[int]]) -> int:
    """Tokens of the fullest part."""
    return max(sum(lengths[i] for i in part) for part in parts)


def compare_balance(count: int) -> None:
    """Print the ratio of the fullest part to the mean, for random batches and for 512 lengths in 64 parts."""
    worse, better = [], 0
    for seed in range(count):
        lengths, parts = make_batch(seed)
        for equal in (False, True):
            found = fullest(lengths, balance(lengths, range(len(lengths)), parts, equal=equal))
            expected = fullest(lengths, get_seqlen_balanced_partitions(lengths, parts, equal))
            better += found < expected
            if found > expected:
                worse.append((seed, parts, len(lengths), equal, found, expected))
    print(f"{2 * count} divisions: better in {better}, equal in {2 * count - better - len(worse)}, worse in {worse}")
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(7.5, 0.9)) for _ in range(512)]
    for equal in (False, True):
        for name, function in (
            ("rlhpc", lambda equal=equal: balance(lengths, range(512), 64, equal=equal)),
            ("verl", lambda equal=equal: get_seqlen_balanced_partitions(lengths, 64, equal=equal)),
        ):
            began = time.perf_counter()
            sums = [sum(lengths[i] for i in part) for part in function()]
            seconds = time.perf_counter() - began
            counts = "equal counts" if equal else "free counts"
            print(f"{name:6s} {counts:13s} max/mean {max(sums) * 64 / sum(sums):.4f}  {seconds * 1e3:.1f} ms")


def write_golden() -> None:
    cases = [peer.make_case(seed) for seed in itertools.islice(_fit_seeds(), GOLDEN_CASES)]
    peer.store([(case, theirs(case)) for case in cases], VERSIONS)


def write_golden_balance() -> None:
    fullest_parts = {
        name: [fullest(lengths, get_seqlen_balanced_partitions(lengths, parts, equal)) for lengths, parts in batches]
        for batches in [[make_batch(seed) for seed in range(200)]]
        for name, equal in (("free", False), ("equal", True))
    }
    np.savez_compressed(GOLDEN_BALANCE, versions=np.array(json.dumps(VERSIONS)), **fullest_parts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1]:
        case "compare":
            compare(int(sys.argv[2]))
        case "compare64":
            compare(int(sys.argv[2]), double=True)
        case "balance":
            compare_balance(int(sys.argv[2]))
        case "golden":
            write_golden()
        case "golden-balance":
            write_golden_balance()
