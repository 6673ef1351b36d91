"""Sections about what is generated: the engines, tools, which prompts' responses a step learns from, their reuse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhpc.config.sampling import ResolvedSampling, SamplingOverrides, SamplingSection
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

# Batches of which vLLM has CUDA graphs differ by so many, from 256 on (config/vllm.py, _set_cudagraph_sizes).
GRAPH_STRIDE = 16
DEFAULT_SEQUENCES = 256  # concurrent sequences of an engine; with a larger cache more, a smaller one lets some wait


# Package that a method of speculative decoding needs, by which vLLM searches earlier tokens; a second model needs none.
GUESSERS = {"ngram": "numba", "suffix": "arctic_inference"}
HEADS = ("eagle", "eagle3", "mtp")  # methods that guess from the policy's hidden states


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
        """Whether a network of its own weights guesses: a second model or a head."""
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
    """What else tokens are drawn by: top_k, min_p, penalties, texts and tokens that end a turn, forms of responses; see
    docs/sampling.md."""
    sampling_by_source: dict[str, SamplingOverrides] = {}
    """Keys of sampling, and top_p, that replace them for prompts of a data source, by its name."""
    tools: list[ToolSection] = []
    """Tools that the policy may call; see docs/tools.md."""
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
        """What responses to prompts of a data source are sampled with; None: of a source without its own keys.
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
        """Whether engines return the tokens that each one was drawn from."""
        return any(sampling.returns_kept for sampling in self.samplings)

    @property
    def trains_what_it_samples(self) -> bool:
        """Whether the trained distribution is the one that tokens were drawn from, and their log-probs can be
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
