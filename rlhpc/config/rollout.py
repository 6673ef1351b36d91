"""Sections of generation: sampling of tokens, tools, engines, choice of groups and their reuse, ranks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhpc.config.section import (
    Fraction,
    ImportPath,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveSeconds,
    Section,
    Share,
)

# The most tokens of which an engine returns the set that a token was drawn from: it bounds what travels with a token.
MAX_KEPT = 512
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, Field(min_length=1)]

# Batches of which vLLM has CUDA graphs differ by so many, from 256 on (config/vllm.py, _set_cudagraph_sizes).
GRAPH_STRIDE = 16
DEFAULT_SEQUENCES = 256  # concurrent sequences of an engine; with a larger cache more, a smaller one lets some wait

# Package that a method of speculative decoding needs, by which vLLM searches earlier tokens; a second model needs none.
GUESSERS = {"ngram": "numba", "suffix": "arctic_inference"}
HEADS = ("eagle", "eagle3", "mtp")  # methods that guess from the policy's hidden states

PlacementName = Literal["colocated", "separate", "lend"]
CostSeconds = Annotated[float, Field(ge=0, le=1e6)]


class StructuredOutputSection(Section):
    """Form of turns, by one of the keys."""

    json_schema: dict[str, Any] | None = None
    """JSON schema of a response."""
    regex: _Text | None = None
    """Regular expression of a whole response."""
    choice: list[_Text] | None = None
    """Texts, one of which is the response."""
    grammar: _Text | None = None
    """Grammar of a response in EBNF."""

    @property
    def given(self) -> dict[str, Any]:
        """The keys that have a value."""
        return {name: value for name, value in self if value is not None}


class SamplingSection(Section):
    top_k: PositiveInt | None = None
    """Number of most probable tokens that one is drawn from; default: all. Up to 512 the loss trains the distribution
    over the same tokens."""
    min_p: Share = 0.0
    """Minimum probability of a token, as a fraction of the most probable one's."""
    repetition_penalty: PositiveFloat = 1.0
    """Divisor of positive logits, and factor of negative ones, of tokens in the prompt and the response so far."""
    presence_penalty: _Penalty = 0.0
    """Penalty subtracted from logits of tokens in the turn so far."""
    frequency_penalty: _Penalty = 0.0
    """Penalty subtracted from a token's logit for each time that it is in the turn so far."""
    logit_bias: dict[NonNegativeInt, float] = {}
    """Bias added to logits, by token id."""
    min_tokens: NonNegativeInt = 0
    """Minimum length of a response in tokens: until then no token that ends it is drawn."""
    stop: list[_Text] = []
    """Texts that end a turn, which includes them."""
    train_on_stop: bool = True
    """Training on tokens of the text that ended a turn."""
    stop_token_ids: list[NonNegativeInt] = []
    """Further token ids that end a turn."""
    bad_words: list[_Text] = []
    """Texts that are not generated."""
    structured_output: StructuredOutputSection | None = None
    """Form of each turn: JSON, a regular expression, a choice or a grammar."""

    @property
    def needs_text(self) -> bool:
        """True if the engine must have a tokenizer."""
        return bool(self.stop or self.bad_words or self.structured_output)


class SamplingOverrides(Section):
    """Keys that replace those of rollout.sampling; null: as there. All are optional: a configuration that was written
    with every key means the same."""

    top_p: Fraction | None = None
    """Nucleus sampling threshold; default: rollout.top_p."""
    top_k: NonNegativeInt | None = None
    """Number of most probable tokens that one is drawn from; 0: all."""
    min_p: Share | None = None
    """Minimum probability of a token, as a fraction of the most probable one's."""
    repetition_penalty: PositiveFloat | None = None
    """As rollout.sampling.repetition_penalty."""
    presence_penalty: _Penalty | None = None
    """As rollout.sampling.presence_penalty."""
    frequency_penalty: _Penalty | None = None
    """As rollout.sampling.frequency_penalty."""
    logit_bias: dict[NonNegativeInt, float] | None = None
    """Bias added to logits, by token id."""
    min_tokens: NonNegativeInt | None = None
    """Minimum length of a response in tokens."""
    stop: list[_Text] | None = None
    """Texts that end a turn."""
    train_on_stop: bool | None = None
    """Training on tokens of the text that ended a turn."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """Further token ids that end a turn."""
    bad_words: list[_Text] | None = None
    """Texts that are not generated."""
    structured_output: StructuredOutputSection | None = None
    """Form of each turn."""

    @property
    def given(self) -> dict[str, Any]:
        """The keys that have a value, as rollout.sampling has them."""
        found = {name: value for name, value in self if value is not None}
        return found | ({"top_k": None} if self.top_k == 0 else {})


class ResolvedSampling(SamplingSection):
    """All that responses of a data source are sampled with, but for the temperature."""

    top_p: Fraction = 1.0

    @property
    def truncates(self) -> bool:
        """True if some tokens have no chance though the model gives them one."""
        cut = self.top_p < 1 or self.top_k is not None or self.min_p > 0
        return bool(cut or self.min_tokens or self.bad_words or self.structured_output)

    @property
    def returns_kept(self) -> bool:
        """True if the engine returns the tokens that one was drawn from."""
        return self.top_k is not None and self.top_k <= MAX_KEPT

    @property
    def shifts(self) -> tuple[str, ...]:
        """Keys by which kept tokens have other probabilities, relative to each other, than the model's."""
        neutral: dict[str, Any] = {
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
        }
        return tuple(name for name, value in neutral.items() if getattr(self, name) != value)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Keys that truncate the distribution while the engine does not return the kept tokens."""
        if not self.truncates or self.returns_kept:
            return ()
        neutral: dict[str, Any] = {"top_p": 1.0, "top_k": None, "min_p": 0.0, "min_tokens": 0, "bad_words": []}
        found = [name for name, value in neutral.items() if getattr(self, name) != value]
        return (*found, *(["structured_output"] if self.structured_output else []))

    def replaced(self, overrides: SamplingOverrides | None) -> ResolvedSampling:
        """The same with the keys that ``overrides`` gives."""
        return self if overrides is None else self.model_copy(update=overrides.given)


class ToolSection(Section):
    """A Python function, or an object of each conversation's own, that the policy calls between its turns."""

    name: Annotated[str, Field(pattern=r"^[\w-]+$")]
    """Name by which the policy calls the tool."""
    function: ImportPath
    """Import path of a function called as function(**call, **arguments), or of a class or module:Class.method with an
    object for each conversation."""
    arguments: dict[str, Any] = {}
    """Keyword arguments hidden from the policy."""


class SpeculativeSection(Section):
    """Speculative decoding: several tokens of a response are guessed, and computed in one step. No token changes; see
    docs/sampling.md."""

    method: Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"] = "ngram"
    """Source of guesses: earlier tokens (ngram), all of the engine's responses (suffix), a smaller model (draft_model),
    a head (eagle, eagle3), or the policy's own layers (mtp)."""
    model: Path | None = None
    """Path to the smaller model (draft_model), dense and with the policy's vocabulary, or to the head (eagle, eagle3).
    Neither is trained."""
    tokens: Annotated[int, Field(ge=1, le=64)] = 5
    """Maximum guessed tokens per response and step."""
    min_match: PositiveInt = 2
    """Minimum number of tokens that must have occurred before, with ngram."""
    max_match: PositiveInt = 4
    """Maximum number of tokens that are compared, with ngram."""
    min_acceptance: Share = 0.25
    """Fraction of guesses that must be right; an engine with fewer stops guessing for a while."""
    arguments: dict[str, Any] = {}
    """Further fields of vLLM's SpeculativeConfig, such as suffix_decoding_max_tree_depth."""

    @property
    def by_network(self) -> bool:
        """True if a network of its own weights guesses: a second model or a head."""
        return self.method in ("draft_model", *HEADS)


class RolloutSection(Section):
    ranks: PositiveInt | None = None
    """Number of ranks that only generate, the last of the job, with placement separate or lend; or set nodes."""
    nodes: PositiveInt | None = None
    """Number of nodes whose ranks only generate, the last of the job, with placement separate or lend; or set ranks."""
    tp: PositiveInt = 1
    """Tensor parallel size of each vLLM engine."""
    expert_parallel: bool = False
    """Expert parallelism: each of an engine's tp ranks holds whole experts instead of a slice of each; no effect on
    dense models."""
    samples_per_prompt: PositiveInt = 8
    """Number of responses per prompt in an RL step: the group that advantages compare."""
    max_response_tokens: PositiveInt = 1024
    """Maximum response length in tokens, over all turns and tool answers."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the loss divides logits by it too."""
    top_p: Fraction = 1.0
    """Nucleus sampling threshold. Below 1, without sampling.top_k, the sampled policy is not the trained one; see
    docs/sampling.md."""
    sampling: SamplingSection = SamplingSection()
    """Further options of sampling: top_k, min_p, penalties, texts and tokens that end a turn, forms of responses; see
    docs/sampling.md."""
    sampling_by_source: dict[str, SamplingOverrides] = {}
    """Keys of sampling, and top_p, that replace them for prompts of a data source, by its name."""
    tools: list[ToolSection] = []
    """Tools that the policy may call; see docs/tools.md."""
    tool_parser: str = "auto"
    """Parser of tool calls: hermes, harmony, or one of vLLM's; auto: the one that reads the chat template's calls."""
    max_turns: PositiveInt = 8
    """Maximum turns of the policy per response, with tools; calls in the last turn are not run and truncate
    the response."""
    max_calls_per_turn: PositiveInt = 16
    """Maximum tool calls per turn; further calls are not run, and the policy is informed."""
    tool_time_limit_seconds: PositiveSeconds = 10.0
    """Time limit of one tool call, in seconds; a call beyond it is ended, and the policy is informed."""
    tool_processes: PositiveInt = 4
    """Number of tool processes beside each engine, and so of concurrent calls."""
    max_tool_answer_tokens: PositiveInt = 512
    """Maximum length of a tool's answer in tokens; of a longer one the policy sees only the length."""
    max_num_seqs: PositiveInt | None = None
    """Maximum concurrent sequences per engine (vLLM's max_num_seqs); default: those of the expected length that the KV
    cache holds, 256 to 1024."""
    kv_cache_gib: PositiveFloat | None = None
    """KV cache of each engine on a rank, in GiB; default on a GPU: what gpu_memory_utilization leaves, on a CPU: 1."""
    gpu_memory_utilization: Fraction = 0.6
    """Fraction of GPU memory for engine weights and KV cache while generating; it must be free when the engine starts.
    No effect with kv_cache_gib."""
    dealing: Literal["equal", "longest_first", "turns"] = "longest_first"
    """Order of responses that wait for a place among max_num_seqs: as they come (equal), long ones first
    (longest_first), or in turns. See docs/sampling.md."""
    prefix_caching: bool = True
    """Prefix caching: the responses of a group share their prompt's KV cache."""
    chunked_prefill: bool = True
    """Chunked prefill: long prompts are processed in chunks between other sequences' tokens."""
    cuda_graphs: bool = True
    """CUDA graphs for decoding; no effect on a CPU."""
    compile: bool = False
    """Compilation of the engine's model, half a minute at its start, on a CPU or without cuda_graphs; with them it is
    always compiled."""
    speculative: SpeculativeSection | None = None
    """Speculative decoding; default: none. See docs/sampling.md."""
    engine: dict[str, Any] = {}
    """Further arguments of vLLM's engine, by the fields of its EngineArgs, such as max_num_batched_tokens. See
    docs/sampling.md."""

    def sampling_of(self, source: str | None, overrides: SamplingOverrides | None = None) -> ResolvedSampling:
        """Sampling of responses to prompts of a data source; None: of a source without its own keys.
        ``overrides``: of a use of its own, such as validation."""
        own = {name: getattr(self.sampling, name) for name in SamplingSection.model_fields}
        resolved = ResolvedSampling.model_construct(**own, top_p=self.top_p)
        return resolved.replaced(self.sampling_by_source.get(source or "")).replaced(overrides)

    @property
    def samplings(self) -> tuple[ResolvedSampling, ...]:
        """Those of the responses that are trained on."""
        return tuple(self.sampling_of(source) for source in (None, *self.sampling_by_source))

    @property
    def returns_kept(self) -> bool:
        """True if engines return the tokens that each one was drawn from."""
        return any(sampling.returns_kept for sampling in self.samplings)

    @property
    def trains_what_it_samples(self) -> bool:
        """True if the trained distribution is the one that tokens were drawn from, and their log-probs can be
        compared."""
        return not any(sampling.shifts or sampling.cuts for sampling in self.samplings)

    @property
    def sequences(self) -> int:
        """max_num_seqs, or its default where the KV cache's size is not known."""
        return self.max_num_seqs or DEFAULT_SEQUENCES


class DynamicSamplingSection(Section):
    """Training only on groups with non-zero advantage (Yu et al. 2025, section 3.2); see docs/dynamic_sampling.md."""

    metric: str = "reward"
    """Name of the value whose equality over all samples drops a group: reward, or a part of the reward."""
    filter: ImportPath | None = None
    """Import path of your own filter, called as function(samples, **arguments) in place of metric; true keeps the
    group."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the filter."""
    max_batches: PositiveInt = 10
    """Maximum batches of prompts that a step requests until its own batch is full."""
    shortage: Literal["warn", "error"] = "warn"
    """Action when max_batches did not fill the batch: train on fewer groups (warn), or end the run (error)."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Number of prompts requested per missing group. Above 1, unfinished responses are resumed in the next step."""
    check_every: PositiveInt = 16
    """Interval in tokens per response between checks for a full batch, with oversample above 1."""
    max_staleness: NonNegativeInt = 4
    """Maximum staleness of surplus and unfinished groups, in policy versions; a step waits for groups that would exceed
    it."""


class ReplaySection(Section):
    """Replay of groups from earlier steps; see docs/dynamic_sampling.md."""

    capacity: PositiveInt
    """Capacity of the buffer in groups; the oldest are evicted first."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Fraction of each step's groups taken from the buffer, as far as it has them."""
    max_staleness: PositiveInt = 8
    """Maximum staleness of a replayed group, in policy versions."""
    order: Literal["newest", "uniform"] = "newest"
    """Order of selection: the newest groups first, or uniform at random."""


def replayed_groups(groups: int, fraction: float, available: int) -> int:
    """Number of a step's groups from the replay buffer; at least one is new."""
    return min(round(groups * fraction), available, groups - 1)


class CostsSection(Section):
    """Constants of the virtual time that the schedule follows, never measured in the run; see docs/asynchrony.md."""

    step_seconds: CostSeconds | None = None
    """Time of an engine's step without its sequences, in seconds; default: predicted at submission."""
    sequence_seconds: CostSeconds | None = None
    """Time that each sequence adds to an engine's step, in seconds; default: predicted at submission."""
    train_seconds: CostSeconds | None = None
    """Time from the last response of a step's batch to the next weights, in seconds; default: predicted at
    submission."""
    tool_seconds: CostSeconds = 1.0
    """Time from a tool call to its answer, in seconds."""
    lend_seconds: CostSeconds | None = None
    """Part of each step in which trainers' ranks generate, with placement lend, in seconds; default: predicted at
    submission."""


class JudgesSection(Section):
    """Ranks of their own for models beside the actor, between those that train and those that generate; see
    docs/asynchrony.md."""

    ranks: PositiveInt | None = None
    """Number of ranks of the models that are on judges; or set nodes."""
    nodes: PositiveInt | None = None
    """Number of nodes whose ranks are those of the models on judges; or set ranks."""


class AsynchronySection(Section):
    """Generation beside training, with placement separate or lend; see docs/asynchrony.md."""

    max_staleness: NonNegativeInt = 1
    """Maximum staleness of a token that is trained on, in steps: 0 generates and trains in turn."""
    schedule: Literal["deterministic", "arrival"] = "deterministic"
    """Order of generation: by virtual time, so that two runs are equal bit for bit (deterministic), or what is finished
    first (arrival)."""
    replay: Path | None = None
    """Folder of a run with schedule arrival, or that may lose engines, whose recorded order is followed, for equal
    weights bit for bit."""
    in_flight: Literal["recompute", "keep", "finish"] = "recompute"
    """Treatment of responses in flight when new weights arrive: recompute their KV cache, keep it, or finish them on
    the old weights first."""
    costs: CostsSection = CostsSection()
