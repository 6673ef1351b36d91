"""Groups and responses for tests, without an engine."""

from __future__ import annotations

import numpy as np

from rlhpc.api import Prompt, Sample
from rlhpc.data.groups import Group
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.requests import blank_draft


def prompt(number: int) -> Prompt:
    return Prompt(number, (10 + number, 20), "source", "answer", {})


def response(number: int, length: int = 3, reward: float = 0.0) -> Sample:
    tokens = np.arange(length, dtype=np.int32)
    draft = blank_draft(prompt(number), 0)
    log_probs = -np.arange(length, dtype=np.float32) / 8
    return Sample(
        prompt_id=number,
        group_id=0,
        tokens=np.concatenate([draft.tokens, tokens]),
        prompt_len=draft.prompt_len,
        log_probs=log_probs,
        reward=reward,
        policy_version=0,
        truncated=False,
    )


def blank_group(number: int, count: int = 2, step: int = 0) -> Group:
    drafts = (blank_draft(prompt(number), 0),) * count
    return Group(number, step, 0, drafts, (False,) * count, (False,) * count)


def scored(number: int, index: int, reward: float = 0.0, **counts: object) -> Scored:
    return Scored(number, index, response(number, reward=reward), **counts)  # type: ignore[arg-type]
