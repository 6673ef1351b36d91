"""Responses as the reference knows them: by the script and the limit of tokens, with their rewards."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.float64.script import END, MOST_TOKENS, OVERLONG, WEIGHTS, decode, prompt_of, score, turns_of


@dataclass
class Answer:
    """A response as the reference knows it. Lists have an entry for each token of the response.

    ``reward`` is the sum of the reward functions; ``baseline`` the reward of the prompt's greedy response.
    """

    prompt: tuple[int, ...]
    tokens: list[int]
    sampled: list[bool]  # by the policy; not by a tool
    truncated: bool
    reward: float
    parts: dict[str, float]
    dropped: bool
    group: int = -1
    versions: list[int] = field(default_factory=list)  # of the policies that sampled its tokens
    fresh: bool = True  # whether the first of them is the step's own
    engine: list[float] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)  # places of the tokens that are trained on
    old: dict[int, float] = field(default_factory=dict)  # log-prob before the step's first update, by place
    reference: dict[int, float] = field(default_factory=dict)
    penalty: dict[int, float] = field(default_factory=dict)  # KL term that is subtracted from the reward, by place
    values: dict[int, float] = field(default_factory=dict)  # the critic's before the step's first update, by place
    baseline: float = 0.0

    @property
    def total(self) -> float:
        """Reward less the KL penalties of its tokens."""
        return self.reward - sum(self.penalty.get(t, 0.0) for t in self.trained)


def answer_of(seed: int, prompt_id: int, place: int) -> Answer:
    """A response with its reward, as the script and the limit of tokens make it."""
    tokens: list[int] = []
    sampled: list[bool] = []
    truncated = False
    for turn in turns_of(seed, prompt_id, place):
        for token in turn.sampled:
            if len(tokens) == MOST_TOKENS:
                truncated = True
                break
            tokens.append(token)
            sampled.append(True)
        if truncated or not turn.reply:
            break
        reply = list(turn.reply)
        if reply[0] == END:  # the policy sampled it itself
            del reply[0]
        if len(tokens) + len(reply) >= MOST_TOKENS:  # no room for another turn
            truncated = True
            break
        for token in reply:
            tokens.append(token)
            sampled.append(False)
    if not truncated and turn.cut:
        truncated = True
    prompt = prompt_of(seed, prompt_id)
    try:
        first = score("script", decode(tokens), None, {"seed": seed, "prompt_id": prompt_id})
    except ValueError:
        return Answer(prompt, tokens, sampled, truncated, 0.0, {}, dropped=True)
    second = overlong(sum(sampled))
    parts = {"score": first, "overlong": second}
    return Answer(prompt, tokens, sampled, truncated, WEIGHTS[0] * first + WEIGHTS[1] * second, parts, dropped=False)


def overlong(length: int) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, equation 13) of a response with that many tokens of the policy: 0, then
    linearly down to -penalty over the buffer."""
    buffer, penalty = OVERLONG["buffer_tokens"], OVERLONG["penalty"]
    if length <= MOST_TOKENS - buffer:
        return 0.0
    return penalty * ((MOST_TOKENS - buffer) - length) / buffer
