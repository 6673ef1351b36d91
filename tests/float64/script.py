"""A run by seed: its configuration, the turns of each response, tools' replies and rewards. Data, no mathematics.

Reward workers import this file: it is free of torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhpc.config.algorithm import DEFAULTS

VOCABULARY = 13
END = 1  # of a turn
FIRST = 2  # a response's first token is FIRST + its place in the group
GREEDY = 5  # place of a prompt's greedy response
POSITIONS = 5  # rows of a table's second part
STEPS = 3
PROMPTS = 120
MOST_TOKENS = 12  # of a response
OVERLONG = {"buffer_tokens": 4, "penalty": 0.5}
WEIGHTS = (1.0, 0.7)  # of the two reward functions
NAMES = tuple(DEFAULTS)
ESTIMATORS = ("k1", "k2", "k3")
PLACEMENTS = ("loss", "reward")
AGGREGATIONS = ("token-mean", "sequence-mean", "constant")
METHODS = ("none", "truncate", "mask")
SCHEDULES = ("constant", "cosine", "linear")
LEVELS = ("token", "sequence")

REWARDS: list[dict[str, Any]] = [
    {"name": "score", "function": "tests.float64.script:score", "weight": WEIGHTS[0]},
    {
        "name": "overlong",
        "function": "rlhpc.rewards.formats:overlong",
        "arguments": OVERLONG,
        "weight": WEIGHTS[1],
    },
]


@dataclass(frozen=True)
class Turn:
    """Tokens that the policy samples, and what tools reply. The last turn has no reply; ``cut``: it calls a tool, but
    no further turn is allowed."""

    sampled: tuple[int, ...]
    reply: tuple[int, ...] = ()
    cut: bool = False


def rng_of(*key: object) -> np.random.Generator:
    """Random numbers that the key alone determines."""
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()))


def config_of(seed: int) -> dict[str, Any]:
    """The configuration of a run. Consecutive seeds take one algorithm after the other."""
    rng = rng_of("config", seed)
    samples = int(rng.choice([1, 2, 3, 4], p=[0.1, 0.2, 0.4, 0.3]))
    prompts = int(rng.integers(3, 6)) + (2 if samples == 1 else 0)
    train = {
        "steps": STEPS,
        "prompts_per_step": prompts,
        "minibatches": int(rng.integers(1, 4)),
        "epochs": int(rng.integers(1, 3)),
        "tokens_per_microbatch": int(rng.choice([16, 40, 400])),
        "log_prob_tokens_per_microbatch": [None, 24][int(rng.random() < 0.5)],
        "max_grad_norm_ratio": 1.1 if rng_of("spikes", seed).random() < 0.4 else None,
        "max_skipped_updates": 100,
        "shuffle": bool(rng_of("shuffle", seed).random() < 0.7),
        "mask_truncated": bool(rng.random() < 0.5),
        "dynamic_sampling": _dynamic_sampling(rng) if rng.random() < 0.5 else None,
        "replay": _replay(rng) if rng.random() < 0.5 else None,
    }
    return {
        "name": "float64",
        "seed": seed,
        "model": {"path": "nowhere"},
        "train": train,
        "rollout": {
            "samples_per_prompt": samples,
            "max_response_tokens": MOST_TOKENS,
            "temperature": float(rng.choice([1.0, 0.7, 1.3])),
        },
        "data": {"shuffle": False},
        "rewards": REWARDS,
        "reward_workers": {"on_failure": "drop", "per_engine": 1},
        "reshard": {"max_logprob_diff": None},
        "actor": {"parallel": _parallel(rng), "optimizer": _optimizer(rng)},
        "critic": {
            "parallel": _parallel(rng),
            "optimizer": _optimizer(rng),
            "warmup_steps": int(rng.random() < 0.6),
            "value_clip": [None, 0.003][int(rng.random() < 0.8)],
        },
        "algorithm": algorithm_of(NAMES[seed % len(NAMES)], rng),
    }


def algorithm_of(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """A section in which about half of the keys have other values than the algorithm's defaults."""
    section: dict[str, Any] = {"name": name}

    def sometimes(key: str, *values: Any, share: float = 0.5) -> None:
        if rng.random() < share:
            section[key] = values[int(rng.integers(len(values)))]

    sometimes("clip_low", 0.02, 0.1)
    sometimes("clip_high", 0.03, 0.3)
    sometimes("dual_clip", 1.01, 1.1)
    sometimes("normalise_std", True, False)
    sometimes("std_epsilon", 1e-6, 0.01, share=0.3)
    sometimes("gamma", 1.0, 0.9)
    sometimes("gae_lambda", 0.0, 0.8, 1.0)
    sometimes("aggregation", *AGGREGATIONS)
    sometimes("aggregation_length", 7, share=0.3)
    sometimes("entropy_coefficient", 0.01)
    kl: dict[str, Any] = {"coefficient": float(rng.choice([0.0, 0.05, 0.2], p=[0.2, 0.4, 0.4]))}
    if rng.random() < 0.6:
        kl["estimator"] = str(rng.choice(ESTIMATORS))
    if rng.random() < 0.5:
        kl["placement"] = str(rng.choice(PLACEMENTS))
    if rng.random() < 0.6:
        kl |= {"target": float(rng.choice([0.01, 0.5])), "horizon": 100}
    method, level = str(rng.choice(METHODS)), str(rng.choice(LEVELS))
    return {**section, "kl": kl, "rollout_correction": {"method": method, "level": level, "low": 0.8, "high": 1.2}}


def _dynamic_sampling(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "oversample": float(rng.choice([1.0, 1.5, 2.0])),
        "check_every": int(rng.integers(1, 4)),
        "max_batches": 3,
        "max_staleness": int(rng.integers(1, 4)),
    }


def _replay(rng: np.random.Generator) -> dict[str, Any]:
    order = str(rng.choice(["newest", "uniform"]))
    return {
        "capacity": int(rng.integers(2, 7)),
        "fraction": 0.5,
        "max_staleness": int(rng.integers(1, 4)),
        "order": order,
    }


def _parallel(rng: np.random.Generator) -> dict[str, int]:
    """Two data-parallel ranks, or two ranks that share the same samples."""
    return [{}, {}, {"tp": 2}, {"cp": 2}][int(rng.integers(4))]


def _optimizer(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "learning_rate": float(rng.choice([3e-3, 3e-2])),
        "epsilon": 1e-3,
        "weight_decay": float(rng.choice([0.0, 0.1])),
        "max_grad_norm": float(rng.choice([0.05, 10.0])),
        "beta1": float(rng.choice([0.9, 0.5])),
        "schedule": str(rng.choice(SCHEDULES)),
        "warmup_steps": int(rng.integers(0, 3)),
        "final_fraction": 0.1,
    }


def table_of(seed: int, name: str, columns: int) -> dict[str, np.ndarray]:
    """Weights of a model: what a token adds to the logits (or the value) after it, and what its position adds. The
    reference is near the actor, or far from it."""
    rng = rng_of("table", seed, name)
    shapes = {"context": (VOCABULARY, columns), "position": (POSITIONS, columns)}
    tables = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    if name != "reference":
        return tables
    scale = float(rng.choice([0.3, 3.0]))
    return {key: table + scale * tables[key] for key, table in table_of(seed, "actor", columns).items()}


def prompt_of(seed: int, prompt_id: int) -> tuple[int, ...]:
    """Tokens of a prompt, which begin with its number."""
    rng = rng_of("prompt", seed, prompt_id)
    high, low = divmod(prompt_id, VOCABULARY)
    return (high, low, *rng.integers(FIRST, VOCABULARY, int(rng.integers(0, 5))).tolist())


def prompt_id_of(tokens: tuple[int, ...]) -> int:
    """Number of the prompt that tokens begin with."""
    return tokens[0] * VOCABULARY + tokens[1]


def turns_of(seed: int, prompt_id: int, place: int) -> list[Turn]:
    """What a response would be without a limit of tokens. Some replies repeat the end of the turn."""
    rng = rng_of("turns", seed, prompt_id, place)
    count = int(rng.choice([1, 2, 3], p=[0.6, 0.25, 0.15]))
    longest = int(rng_of("longest", seed).choice([4, 7]))
    turns = []
    for number in range(count):
        words = rng.integers(FIRST, VOCABULARY, int(rng.integers(0, longest))).tolist()
        begin = [FIRST + place] if number == 0 else []
        reply = rng.integers(FIRST, VOCABULARY, int(rng.integers(1, 4))).tolist() if number < count - 1 else []
        repeated = [END] if reply and rng.random() < 0.5 else []
        cut = number == count - 1 and bool(rng.random() < 0.1)
        turns.append(Turn((*begin, *words, END), (*repeated, *reply), cut))
    return turns


def engine_noise(seed: int, prompt_id: int, place: int, position: int) -> float:
    """By how much the engine's log-prob of a token differs from that of the trainer's weights."""
    scale = float(rng_of("noise", seed).choice([0.0, 0.05, 0.4]))
    return scale * float(rng_of("noise", seed, prompt_id, place, position).standard_normal())


def decode(tokens: Any) -> str:
    """The text that reward functions read."""
    return " ".join(map(str, tokens))


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Reward of a response by its text. Raises for some responses, which are dropped."""
    seed, prompt_id = extra_info["seed"], extra_info["prompt_id"]
    rng = rng_of("score", seed, prompt_id, solution_str)
    if rng.random() < 0.08:
        raise ValueError("no score")
    match rng_of("kind", seed).choice(["binary", "real", "equal"], p=[0.45, 0.4, 0.15]):
        case "binary":
            return float(rng.random() < 0.5)
        case "real":
            return float(rng.standard_normal())
    return 0.1
