"""Sections about what is generated: the engines, tools, which prompts' responses a step learns from, their reuse."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhpc.config.section import Fraction, ImportPath, NonNegativeInt, PositiveFloat, PositiveInt, Section


class ToolSection(Section):
    """A Python function, or an object that each conversation has of its own, called by the policy between its turns."""

    name: Annotated[str, Field(pattern=r"^[\w-]+$")]
    """What the policy calls it."""
    function: ImportPath
    """Called as function(**what the policy gives, **arguments); its docstring and types are told to the policy. Of a
    class, or module:Class.method, every conversation has an object, made with the arguments."""
    arguments: dict[str, Any] = {}
    """Keyword arguments that the policy neither sees nor gives."""


class RolloutSection(Section):
    tp: PositiveInt = 1
    """Tensor parallel size of each vLLM engine."""
    expert_parallel: bool = False
    """Each of an engine's tp ranks keeps whole experts instead of a part of every one; no effect on dense models."""
    samples_per_prompt: PositiveInt = 8
    """Responses to each prompt of an RL step: the group that a response is compared with."""
    max_response_tokens: PositiveInt = 1024
    """A response is cut off here: all of its turns together, what tools answer too."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in sampling and in the loss."""
    top_p: Fraction = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    tools: list[ToolSection] = []
    """What the policy may call, each with name, function and arguments; see docs/tools.md."""
    max_turns: PositiveInt = 8
    """With tools: the policy speaks so often in a response; what it calls in its last turn is not run."""
    max_calls_per_turn: PositiveInt = 16
    """With tools: what a turn calls beyond that is not run, and the policy told so."""
    tool_time_limit_seconds: PositiveFloat = 10.0
    """A call that takes longer is ended, and the policy told so."""
    tool_processes: PositiveInt = 4
    """Calls that run at once beside each engine, in processes of their own."""
    max_tool_answer_tokens: PositiveInt = 512
    """In place of a longer answer the policy is told its length."""
    max_num_seqs: PositiveInt = 256
    """Most sequences that an engine decodes at once."""
    kv_cache_gib: PositiveFloat | None = None
    """KV cache of each engine on a rank, in GiB; default on a GPU: what gpu_memory_utilization leaves, on a CPU: 1."""
    gpu_memory_utilization: Fraction = 0.6
    """Share of the GPU's memory that engine weights and KV cache may take while generating, and that must be free when
    the engine starts. No effect with kv_cache_gib: the engine then claims what it needs."""
    prefix_caching: bool = True
    """vLLM keeps the cache of a prompt for all its responses."""
    chunked_prefill: bool = True
    """vLLM takes long prompts in parts, between the tokens of others."""
    cuda_graphs: bool = True
    """Capture CUDA graphs for decoding; no effect on a CPU."""


class DynamicSamplingSection(Section):
    """Only groups that teach something are learnt from (Yu et al. 2025, section 3.2); see docs/dynamic_sampling.md."""

    metric: str = "reward"
    """Groups are dropped in which this is the same for all samples: the reward, or a part of it by its name."""
    filter: ImportPath | None = None
    """Your own in its place, called as function(samples, **arguments); true keeps the group."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the filter."""
    max_batches: PositiveInt = 10
    """Batches of prompts that a step asks for at most, until its own is full."""
    shortage: Literal["warn", "error"] = "warn"
    """What a step does when they were not enough; without any group it learns nothing and counts all the same."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Prompts asked for each one that is missing. Above 1 a step ends when its batch is full; what is unfinished then
    is taken up again in the next step, where it was."""
    check_every: PositiveInt = 16
    """With oversample above 1: tokens of each response between two looks at whether enough is done."""
    max_staleness: NonNegativeInt = 4
    """Versions of the weights after which kept groups, finished or not, are dropped; each weight sync makes one."""


class ReplaySection(Section):
    """Groups of former steps learnt from once more; see docs/dynamic_sampling.md."""

    capacity: PositiveInt
    """Groups kept; the oldest leave first."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of each step's groups that come from the buffer, as far as it has them."""
    max_staleness: PositiveInt = 8
    """Versions of the weights after which a group is not used again; each weight sync makes one."""
    order: Literal["newest", "uniform"] = "newest"
    """Which of them: the newest ones, or any with the same probability."""
