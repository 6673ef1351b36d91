"""The values that flow through a step. T is the number of tokens of a packed batch, S of its sequences.

What a token of a response is drawn from, beside temperature and top_p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Int16, Int32, Int64
from torch import Tensor


@dataclass(frozen=True)
class SamplingOptions:
    """Options of one request; see ``rlhpc.config.rollout.SamplingSection``."""

    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # of the rest of the response
    stop: tuple[str, ...] = ()
    train_on_stop: bool = True
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    structured_output: tuple[str, Any] | None = None  # kind, and what of it

    @property
    def depends_on_turn(self) -> bool:
        """Whether a token depends on which earlier ones are of its turn: a turn that is interrupted begins again."""
        counted = self.presence_penalty or self.frequency_penalty
        return bool(counted or self.stop or self.bad_words or self.structured_output)


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file, tokenized. ``prompt_id`` is its row number over all files. ``text`` is its source,
    plain text or messages; None if nothing needs it."""

    prompt_id: int
    tokens: tuple[int, ...]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    text: str | Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Request:
    """A response to generate, or the rest of one. The seed makes it independent of the engine and of its batch.

    The random numbers of a token depend on the seed and the token's position, prompt included: a response that is
    aborted and resumed with the same seed equals an uninterrupted one.
    """

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    options: SamplingOptions = field(default_factory=SamplingOptions)
    later_turn: bool = False  # the prompt ends with a tool's reply; for statistics


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that each token of a response was drawn from, the drawn one among them."""

    tokens: np.ndarray  # int32 [sum of counts]
    counts: np.ndarray  # int32 [response]; 0: the whole vocabulary, or not sampled

    def __getitem__(self, part: slice) -> KeptTokens:
        """Those of some tokens of the response, one after the other."""
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        first, last, step = part.indices(len(self.counts))
        assert step == 1
        assert first <= last
        return KeptTokens(self.tokens[ends[first] : ends[last]], self.counts[first:last])

    @classmethod
    def whole(cls, length: int) -> KeptTokens:
        """Of ``length`` tokens that were drawn from the whole vocabulary."""
        return cls(np.zeros(0, np.int32), np.zeros(length, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Of responses' parts, one after the other."""
        return cls(np.concatenate([one.tokens for one in parts]), np.concatenate([one.counts for one in parts]))


@dataclass(frozen=True)
class Completion:
    """Sampled tokens and the log-probs (natural log, of logits / temperature) they were sampled with."""

    tokens: np.ndarray  # int32 [response]
    log_probs: np.ndarray  # float32 [response]
    truncated: bool  # stopped by max_tokens, not by an end token
    routed_experts: np.ndarray | None = (
        None  # uint8 or int16 [prompt + response - 1, layers with experts, top_k], if asked for
    )
    tool_tokens: int = 0  # of tools' answers, in a whole response of several turns
    kept: KeptTokens | None = None  # if asked for
    stop_tokens: int = 0  # last ones, of a text that ended the turn and is not trained on


@dataclass(frozen=True)
class RewardResult:
    """Reward of one response: the weighted sum of all rewards, and each by name."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    dropped: bool = False  # a reward failed, and reward_workers.on_failure is drop
    answer: str | None = None  # the answer extracted from the response, "" if none; None if no reward extracts it
    failures: tuple[str, ...] = ()  # kind of each reward that failed: raised, result, timeout, memory, died


@dataclass(frozen=True)
class Sample:
    """A prompt with one response, scored. Samples of one ``group_id`` answer the same prompt in the same step.

    A response may contain tokens that the policy did not sample, such as a tool's answer: there ``response_mask`` is
    False and ``log_probs`` 0, and they are not trained on.
    """

    prompt_id: int
    group_id: int
    tokens: np.ndarray  # int32 [prompt + response]
    prompt_len: int
    log_probs: np.ndarray  # float32 [response], the engine's
    reward: float
    policy_version: int  # of the weights that sampled its oldest token
    truncated: bool  # stopped by max_tokens, or by max_turns before its last calls
    routed_experts: np.ndarray | None = None  # see Completion
    response_mask: np.ndarray | None = None  # bool [response]; None: all
    reward_parts: dict[str, float] = field(default_factory=dict)  # see RewardResult
    answer: str | None = None  # see RewardResult
    tool_tokens: int = 0  # tokens of the response that the policy did not sample
    token_versions: np.ndarray | None = None  # int32 [response], of the weights that sampled each token, of the last
    # sampled one before tokens of tools; None: policy_version for all
    reference_log_probs: np.ndarray | None = None  # float32 [response], of a reference beside the engine
    kept_tokens: np.ndarray | None = None  # int32, see KeptTokens; None: the whole vocabulary for all tokens
    kept_counts: np.ndarray | None = None  # int32 [response]
    stop_tokens: int = 0  # last ones, see Completion

    @property
    def response_len(self) -> int:
        """Number of tokens of the response, tools' answers included."""
        return len(self.tokens) - self.prompt_len

    @property
    def kept(self) -> KeptTokens | None:
        """What its tokens were drawn from."""
        if self.kept_tokens is None or self.kept_counts is None:
            return None
        return KeptTokens(self.kept_tokens, self.kept_counts)

    @property
    def sampled_len(self) -> int:
        """Number of tokens of the response that the policy sampled, masked or not."""
        return self.response_len - self.tool_tokens

    @property
    def trained_len(self) -> int:
        """Number of tokens of the response that are trained on: those that the policy sampled, unless masked."""
        return self.response_len if self.response_mask is None else int(self.response_mask.sum())


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end without padding, every per-token field aligned to the token that predicts.

    ``targets[t]`` follows ``tokens[t]`` in its sequence; ``loss_weight[t]`` is 0 where the target is not trained on
    and otherwise its share in the loss sum (see ``rlhpc.algo.losses``).
    ``extra`` holds further per-token tensors: advantages, old_log_probs, reference_log_probs, engine_log_probs.
    """

    tokens: Int64[Tensor, " T"]
    targets: Int64[Tensor, " T"]
    positions: Int64[Tensor, " T"]
    cu_seqlens: Int32[Tensor, " S+1"]
    loss_weight: Float32[Tensor, " T"]
    sample_ids: tuple[int, ...]  # one for each sequence; none in a blank batch
    routed_experts: Int16[Tensor, "T layers top_k"] | None = (
        None  # 1 + an expert that the token goes to; 0: the router chooses
    )
    routed_layers: tuple[int, ...] | None = (
        None  # places of those layers among the ones with experts; None: all of them
    )
    kept: Int32[Tensor, "T most"] | None = None  # 1 + a token that the target was drawn from; 0: none. Without any: all
    extra: dict[str, Float32[Tensor, " T"]] = field(default_factory=dict)

    def to(self, device: torch.device) -> PackedBatch:
        """Copies the batch to another device."""
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        extra = {name: tensor.to(device, non_blocking=True) for name, tensor in self.extra.items()}
        return replace(self, **moved, extra=extra)

    def blank(self, length: int) -> PackedBatch:
        """A batch of the same fields with one sequence of zeros that is not trained on."""
        blanks = {
            f.name: getattr(self, f.name).new_zeros((length, *getattr(self, f.name).shape[1:]))
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        blanks["positions"] = torch.arange(length, device=self.positions.device)
        blanks["cu_seqlens"] = self.cu_seqlens.new_tensor([0, length])
        extra = {name: tensor.new_zeros(length) for name, tensor in self.extra.items()}
        return replace(self, **blanks, sample_ids=(), extra=extra)

    @property
    def sequence(self) -> Int64[Tensor, " T"]:
        """Index of the sequence that each token belongs to."""
        count = torch.arange(len(self.cu_seqlens) - 1, device=self.cu_seqlens.device)
        return torch.repeat_interleave(count, self.cu_seqlens.diff(), output_size=len(self.tokens))

    @property
    def mask(self) -> Float32[Tensor, " T"]:
        """1 where the target is a token trained on."""
        return (self.loss_weight > 0).float()


@dataclass(frozen=True)
class TokenStats:
    """Output of a language-model head for one packed batch, on every rank that holds it."""

    log_probs: Float32[Tensor, " T"]
    entropy: Float32[Tensor, " T"]


@dataclass(frozen=True)
class TokenValues:
    """Output of a value head for one packed batch: the predicted return at each token."""

    values: Float32[Tensor, " T"]


@dataclass(frozen=True)
class LossSums:
    """Sums over a batch's tokens. ``total`` is differentiated; ``metrics`` are detached sums (or ``max/`` maxima)."""

    total: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


@dataclass(frozen=True)
class TrainStats:
    """Statistics of one optimizer update, equal on every rank. ``sums`` are LossSums.metrics reduced over all ranks.

    ``gauges`` are the back end's own metrics, such as expert load. ``applied`` is false if the update was skipped.
    """

    grad_norm: float
    sums: dict[str, float]
    gauges: dict[str, float] = field(default_factory=dict)
    applied: bool = True


@dataclass(frozen=True)
class UnusableTruth:
    """A ground truth, by its ``index``, that a reward function cannot use; why, and the action on that."""

    index: int
    function: str
    what: str
    action: Literal["error", "zero", "drop"]


@dataclass
class RunState:
    """The one mutable value of a run, restored from a checkpoint with weights and optimizer."""

    sft_step: int = 0  # supervised steps done
    sft_cursor: int = 0  # supervised examples taken
    step: int = 0  # RL steps done
    prompt_cursor: int = 0  # prompts requested; with asynchrony.schedule arrival, those of which all are done
    arrival: dict[str, Any] | None = None  # with that: which later ones are done, and until when others must be
    policy_version: int = 0  # RL steps that have changed the actor's weights
    kl_coefficient: float | None = None  # the present one, if adaptive
    prompts_digest: str = ""  # of the prompts that prompt_cursor counts
    actor_steps: int | None = None  # RL steps that have trained the actor; None in checkpoints without the number
    critic_steps: int | None = None  # the critic
    actor_skipped: int = 0  # the actor's consecutive skipped updates
    critic_skipped: int = 0  # the critic's
    best_of: str = ""  # metric of checkpoint.keep_best, after "max " or "min "
    best_step: int = -1  # total_steps at its best value so far
    best_value: float = 0.0
    trained_responses: int = 0  # of groups that were trained on, with dynamic sampling
    trained_tokens: int = 0  # that the policy sampled in them
    dropped_responses: int = 0  # of groups that were dropped
    dropped_tokens: int = 0
    validated_step: int | None = None  # RL step of the newest validation in the records; None: the present one
    grad_norms: dict[str, list[float]] = field(default_factory=dict)  # newest of sft, actor, critic, to find spikes

    @property
    def total_steps(self) -> int:
        """Steps done in both phases."""
        return self.sft_step + self.step

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunState:
        """The state of a checkpoint, also of former versions, in which ``policy_version`` counted weight syncs: the
        weights may be newer than the last one."""
        state = cls(**record)
        if "trained_tokens" not in record:
            state.policy_version += 1
        return state
