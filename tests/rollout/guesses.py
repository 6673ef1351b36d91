"""Generation with and without guessed tokens, by the plain engine of the session and by engines that guess."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.api import Completion, Request, SamplingOptions
from rlhpc.rollout.vllm_engine import VllmEngine
from tests.rollout import engines

LENGTH = 64
PROMPTS = [tuple((7 * i * (number + 1)) % 90 + 5 for i in range(6 + 9 * number)) * 2 for number in range(8)]
NAMES = ["greedy", "sampled", "cut", "penalized", "stopped", "bad words", "form", "mixed", "alone", "in parts"]
SHARP = 16.0  # factor of the head's weights: responses of a random model then repeat themselves
OPTIONS: dict[str, Any] = {"engine": {"max_num_batched_tokens": 64}, "sampling": {"top_k": 20}}  # prompts in chunks
HEAD_LENGTH = 32  # of responses of the policies that heads know
HEAD_PROMPTS = [tuple((7 * i * (number + 1)) % 190 + 5 for i in range(1 + 23 * number)) for number in range(6)]


@dataclass(frozen=True)
class Plain:
    """Responses without guesses: of the sharpened policy by way of sampling, and of each of the heads' policies."""

    sharp: dict[str, Any]
    policies: list[dict[str, Any]]


def without_guesses(path: Path, policies: list[Path]) -> Plain:
    """Runs one engine, whose weights all have the same shapes."""
    engine = engines.build(path, reads_text=True, **OPTIONS)
    found = sample(engine, path)
    engine.sleep()
    return Plain(found, of_policies(engine, policies))


def drafting(model: Path, **options: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": model, "tokens": 3, "min_acceptance": 0.0, **options}


def heading(method: str, head: Path | None, **options: Any) -> dict[str, Any]:
    return {"method": method, "model": head, "tokens": 3, "min_acceptance": 0.0, **options}


def requests(temperature: float, top_p: float = 1.0, **options: Any) -> list[Request]:
    own = SamplingOptions(**options)
    return [Request(prompt, 100 + i, LENGTH, temperature, top_p, own) for i, prompt in enumerate(PROMPTS)]


def head_requests(temperature: float, top_p: float = 1.0, **options: Any) -> list[Request]:
    own = SamplingOptions(**options)
    return [Request(prompt, 7 + i, HEAD_LENGTH, temperature, top_p, own) for i, prompt in enumerate(HEAD_PROMPTS)]


def sharp(path: Path) -> Any:
    for name, tensor in engines.weights(path):
        yield name, tensor * SHARP if name == "lm_head.weight" else tensor


def with_guesses(path: Path, section: dict[str, Any]) -> dict[str, Any]:
    """Responses of the sharpened policy by way of sampling."""
    return sample(engines.build(path, speculative=section, reads_text=True, **OPTIONS), path)


def sample(engine: VllmEngine, path: Path) -> dict[str, Any]:
    engine.wake_weights()
    engine.load_weights(sharp(path))
    engine.wake_cache()
    found: dict[str, Any] = {}
    for name, asked in (
        ("greedy", requests(0.0)),
        ("sampled", requests(1.0)),
        ("cut", requests(0.8, 0.9, top_k=20)),
        ("penalized", requests(1.0, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=9)),
        ("stopped", requests(1.0, stop_token_ids=tuple(range(5, 25)))),
        ("bad words", requests(1.0, bad_words=("~", "ab"))),
        ("form", requests(1.0, structured_output=("regex", r"(ab[0-9]c){9,}"))),
    ):
        found[name] = engine.generate(asked)
    engine.statistics()
    asked = requests(1.0)
    found["mixed"] = engine.generate([*requests(0.0)[:4], *asked[4:]])
    found["statistics"] = engine.statistics()
    found["alone"] = [engine.generate([request])[0] for request in asked[:3]]
    found["in parts"] = in_parts(engine, asked, 9, 3)
    return found


def of_policies(engine: VllmEngine, policies: list[Path]) -> list[dict[str, Any]]:
    """Responses of each of the policies, asleep before each sync. Chunks are shorter than the longest prompts."""
    found = []
    for policy in policies:
        engines.sync(engine, policy)
        engine.statistics()
        completions, acceptance = {}, {}
        for name, asked in {
            "greedy": head_requests(0.0),
            "sampled": head_requests(1.0),
            "cut": head_requests(0.8, 0.9, top_k=20),
            "penalized": head_requests(1.0, repetition_penalty=1.2, min_tokens=9),
            "longest": [Request((5,) * size, 1, engines.CONTEXT - size, 1.0) for size in (505, 490)],
        }.items():
            completions[name] = engine.generate(asked)
            acceptance[name] = engine.statistics().get("engine/guess_acceptance_mean")
        completions["alone"] = [engine.generate([request])[0] for request in head_requests(1.0)[:3]]
        completions["in parts"] = in_parts(engine, head_requests(1.0), 7, 4)
        engine.sleep()
        found.append({"completions": completions, "acceptance": acceptance, "held": held(engine)})
    return found


def in_parts(engine: Any, requests: list[Request], first: int, then: int) -> list[Completion]:
    """Preempted after ``first`` engine steps, and after ``then`` more aborted and resumed."""
    for key, request in enumerate(requests):
        engine.submit(key, request)
    ended = dict(pair for _ in range(first) for pair in engine.step())
    engine.preempt()
    ended |= dict(pair for _ in range(then) for pair in engine.step())
    begun = engine.abort([key for key in range(len(requests)) if key not in ended])
    rest = [
        Request(
            (*requests[k].prompt, *part.tokens.tolist()),
            requests[k].seed,
            requests[k].max_tokens - len(part.tokens),
            1.0,
        )
        for k, part in begun.items()
    ]
    resumed = dict(zip(begun, engine.generate(rest), strict=True))
    return [ended[k] if k in ended else _joined(begun[k], resumed[k]) for k in range(len(requests))]


def _joined(first: Completion, second: Completion) -> Completion:
    tokens, log_probs = (
        np.concatenate([getattr(one, name) for one in (first, second)]) for name in ("tokens", "log_probs")
    )
    return Completion(tokens, log_probs, second.truncated)


def counted(
    path: Path,
    section: dict[str, Any] | None,
    asked: list[Request],
    pause: int = 0,
    terms: dict[str, int] | None = None,
) -> tuple[list[list[int]], dict[str, int]]:
    """Responses and counts of guesses, which rest for so many tokens from the first step on; ``terms``: other constants
    of when they rest."""
    engine = engines.ready(path, speculative=section)
    worker = engines.worker(engine)
    if section is not None:
        vars(worker._speculation).update({"_pause": pause, **(terms or {})})
    tokens = [completion.tokens.tolist() for completion in engine.generate(asked)]
    return tokens, worker.take_guess_counts() if section is not None else {}


def held(engine: VllmEngine) -> int:
    """Bytes of the guessing model's weights that vLLM holds."""
    model = getattr(getattr(engines.worker(engine).model_runner, "drafter", None), "model", None)
    plain = model.packed_weights._plain.values() if model is not None else []
    return sum(one.tensor.untyped_storage().nbytes() for one in plain)
