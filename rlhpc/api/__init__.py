"""Values that flow through a step, and the protocols of back end, engine and reward workers.

T is the number of tokens of a packed batch, S of its sequences. Every call of a protocol is collective over the ranks
that share the object's model unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float, Float32, Int16, Int32, Int64
from torch import Tensor

from rlhpc.config.training import OptimizerSection
from rlhpc.models import ModelDescription
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Shard, TensorSpec


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
        """True if a token depends on which earlier ones are of its turn: a turn that is interrupted begins again."""
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
        """Kept tokens of some tokens of the response, one after the other."""
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        first, last, step = part.indices(len(self.counts))
        assert step == 1
        assert first <= last
        return KeptTokens(self.tokens[ends[first] : ends[last]], self.counts[first:last])

    @classmethod
    def whole(cls, length: int) -> KeptTokens:
        """Kept tokens of ``length`` tokens that were drawn from the whole vocabulary."""
        return cls(np.zeros(0, np.int32), np.zeros(length, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """Kept tokens of responses' parts, one after the other."""
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
        """Tokens of the vocabulary that its tokens were drawn from."""
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
    def is_blank(self) -> bool:
        """True if the batch only fills up a rank's or a pipeline's round of microbatches."""
        return not self.sample_ids

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


# From the output of the model's head for each token, and the batch.
LossFunction = Callable[[TokenStats, PackedBatch], LossSums] | Callable[[TokenValues, PackedBatch], LossSums]
# On an engine's parameters, by their names, after a load.
CheckWeights = Callable[[Mapping[str, Tensor]], None]


class BackgroundWrite(Protocol):
    """A part of a checkpoint that is being written."""

    def done(self) -> bool:
        """True if this rank's share is written or has failed. Not collective."""

    def finish(self) -> None:
        """Waits for the end; raises OSError on every rank if a share could not be written."""


class TrainBackend(Protocol):
    """A model sharded over ranks, with its optimizer if it is trained. A frozen model (a reference, a reward model) has
    no optimizer, and is never passed to ``train`` or ``differentiate``."""

    @property
    def shape(self) -> ModelDescription:
        """The model's architecture."""

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """Every weight, by HuggingFace's name, in the order of ``full_tensors``."""

    @property
    def layout(self) -> ParallelLayout:
        """The parallel layout that the model is sharded by."""

    @property
    def meets_in_microbatches(self) -> bool:
        """True if ranks with other data wait for each other in every microbatch, as those of experts or FSDP do."""

    @property
    def read_seconds(self) -> float:
        """Seconds that this rank has spent in reading weights and checkpoints from files."""

    def shards(self) -> Sequence[Shard]:
        """The shards of the weights that this rank holds. Not collective."""

    def load_pretrained(self, folder: Path) -> None:
        """Loads weights from a HuggingFace folder or a checkpoint of ``save``, and resets the optimizer."""

    def take_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads whole tensors by HuggingFace's names, from a model in any layout, and resets the optimizer."""

    def copy_weights(self, source: TrainBackend) -> None:
        """Copies the weights of another model of the same back end, shape and layout."""

    def reset_optimizer(self, section: OptimizerSection | None = None) -> None:
        """Starts a new optimizer from the present weights: no moments, step count 0; by ``section`` if given."""

    def log_probs(self, batches: Sequence[PackedBatch], temperature: float) -> list[TokenStats]:
        """Log-probs and entropy of each batch's targets at logits / temperature, without gradient."""

    def values(self, batches: Sequence[PackedBatch]) -> list[TokenValues]:
        """The value head's output for each token, without gradient."""

    def train(
        self,
        batches: Sequence[PackedBatch],
        loss: LossFunction,
        denominator: float,
        temperature: float,
        rate: float,
        skip_above: float = math.inf,
    ) -> TrainStats:
        """One optimizer update on the sum of ``loss(...).total`` over all ranks' batches, divided by ``denominator``.

        Every data-parallel rank passes the same number of batches. If the gradient norm is not finite or exceeds
        ``skip_above``, the update is skipped on all ranks: weights and optimizer state stay bit-equal.
        """

    def differentiate(
        self, batches: Sequence[PackedBatch], loss: LossFunction, denominator: float, temperature: float
    ) -> TrainStats:
        """Forward and backward of ``train`` without the update, for a replay."""

    def has_finite_weights(self) -> bool:
        """True if every weight of every rank is finite. Collective over all ranks."""

    def view(self, shard: Shard) -> Tensor:
        """This rank's live weights of a shard, with the tensor's own number of dimensions."""

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole, by HuggingFace's name, on every rank: the plain path, one tensor at a time."""

    def settle(self) -> None:
        """Waits for what an update has left in flight, such as gathers of its weights."""

    def offload(self, *, keep_parameters: bool = False) -> None:
        """Releases device memory as configured. Later calls restore what they need."""

    def save(self, folder: Path, step: int = 0, *, asynchronous: bool = False) -> BackgroundWrite | None:
        """Writes weights and optimizer state after ``step`` into an existing empty folder, each rank its own shards.

        ``asynchronous``: returns before they are written, with a handle to wait on. Training may continue meanwhile
        without changing what is written.
        """

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote, bit for bit."""


class RewardWorkers(Protocol):
    """Scores responses beside the engine: on the first rank of each engine, in processes of its own."""

    def unusable_truths(self, truths: Sequence[tuple[str, Any]]) -> list[UnusableTruth]:
        """Ground truths, each after its data source, that a function's check refuses, among them the first of each
        function; and all whose check did not finish."""

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        """Begins to score a response; returns at once."""

    def results(self) -> dict[int, RewardResult]:
        """Results of every submitted response that were not returned before, by key; waits for them."""

    def ready(self) -> dict[int, RewardResult]:
        """Results that arrived and were not returned before, by key; does not wait."""

    def close(self) -> None:
        """Ends the processes, at the end of the run."""


class RolloutEngine(Protocol):
    """An inference engine in this process; the ranks of one engine make the same calls."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order; equal on all ranks of the engine."""

    def submit(self, key: int, request: Request) -> None:
        """Adds a request; ``step`` reports its completion by ``key``."""

    def step(self) -> list[tuple[int, Completion]]:
        """Samples the next token of each request in flight; returns the requests that finish with it."""

    def abort(self, keys: Sequence[int]) -> dict[int, Completion]:
        """Withdraws requests; returns what each has generated so far. If others remain, no step may be in flight on the
        device (``settle``)."""

    def settle(self) -> list[tuple[int, Completion]]:
        """Waits for the step in flight on the device, if there is one, and begins no other; returns the requests that
        finish with it. To be called before ``order``, ``preempt`` and ``open_weights`` beside requests."""

    def order(self) -> list[int]:
        """Keys of the requests in flight: running ones, then waiting ones. Another engine that gets the rest of each in
        this order continues as this one does after ``preempt``, bit for bit."""

    def so_far(self, since: Mapping[int, int]) -> dict[int, Completion]:
        """Tokens that requests, by their keys, have generated so far, from a place in each response on; routed experts
        from the prompt on. The requests remain in flight."""

    def preempt(self) -> None:
        """Returns running requests to the head of the queue, in order, and drops cached prefixes. The next steps
        recompute their KV cache."""

    @property
    def unfinished(self) -> int:
        """Number of requests in flight."""

    def statistics(self) -> dict[str, float]:
        """Metrics ``engine/NAME_REDUCTION`` of what was generated since the last call, with the reduction over engines:
        mean, max or sum. Equal on all ranks of the engine."""

    def check_memory(self) -> None:
        """Raises UserError on every rank if any lacks the free memory to wake the engine. Collective over all ranks."""

    def wake_weights(self) -> None:
        """Allocates the memory of the weights; their values are undefined until they are written."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Each parameter of this rank as it is before the engine repacks it. Also while the weights sleep."""

    def open_weights(self, *, in_flight: bool = False) -> Mapping[str, Tensor]:
        """Parameters of the engine, to be written in place; undefined until every one is written.

        ``in_flight``: requests may be in flight, between two steps. They keep their KV cache of the old weights, unless
        ``preempt`` was called before.
        """

    def close_weights(self) -> None:
        """Ends the writing: renews what is derived from the weights, frees temporary memory, drops cached prefixes.
        Those that requests in flight still use are used by no other request."""

    def shareable(self) -> frozenset[str]:
        """Parameters that the engine uses as they are, so that ``share`` may put other memory in their place."""

    def share(self, name: str, tensor: Tensor) -> None:
        """Uses ``tensor``, of the same shape and dtype, as that parameter from now on, and frees its own memory."""

    def discover_shards(self, tensors: Sequence[TensorSpec]) -> Sequence[Shard]:
        """The blocks of the model's ``tensors`` that the parameters of this rank consist of, as the engine's own loader
        fills them. For a model of any architecture, once, before the first weight sync; leaves the engine asleep.

        Raises UserError if a parameter is not made up of blocks of tensors.
        """

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], check: CheckWeights | None = None) -> None:
        """Loads whole tensors by HuggingFace's names through the engine's own loader; drops cached prefixes.

        ``check`` is called with the parameters of ``open_weights`` once they are filled.
        """

    def wake_cache(self) -> None:
        """Allocates the KV cache."""

    def sleep(self) -> None:
        """Frees the memory of weights and KV cache, as far as the device can."""

    def shutdown(self) -> None:
        """Frees everything at the end of the run; the ranks' default process group stays."""
