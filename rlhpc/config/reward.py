"""The section of what scores responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhpc.config.section import ImportPath, PositiveFloat, PositiveInt, Section
from rlhpc.config.training import ParallelSection

DEFAULT_FUNCTION = "rlhpc.rewards.rules:maths"


class RewardFunctionSection(Section):
    """One of several functions whose weighted sum is the reward."""

    name: Annotated[str, Field(pattern=r"^\w+$")]
    """Of its part in the metrics and in the records of samples."""
    function: ImportPath
    """As reward.function."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function."""
    weight: float = 1.0
    """What its number is multiplied by in the sum."""
    time_limit_seconds: PositiveFloat | None = None
    """Time limit of one call of this function, in seconds; default: as for reward.time_limit_seconds."""


class RewardModelSection(Section):
    """A sequence classifier with one label, as HuggingFace saves it, over the tokens of prompt and response."""

    path: Path
    """Its folder."""
    weight: float = 1.0
    """What its number is multiplied by in the sum with those of functions."""
    parallel: ParallelSection | None = None
    """How it is cut; default: like the actor."""
    tokens_per_microbatch: PositiveInt | None = None
    """Most tokens that a rank takes through it at once; default: train.log_prob_tokens_per_microbatch."""
    own_tokenizer: bool | None = None
    """It reads conversations as its folder's tokenizer and chat template write them, not the policy's own tokens;
    default: where the two vocabularies differ."""
    chat_template: bool | Path = True
    """With its own tokenizer: the chat template of its folder, or a Jinja file; false: prompt and response as they
    are."""
    max_tokens: PositiveInt | None = None
    """Longest conversation that it reads; default: its positions."""
    too_long: Literal["error", "truncate"] = "error"
    """A longer conversation ends the run, or loses its beginning."""


class RewardSection(Section):
    function: ImportPath | None = None
    """Called as function(data_source, solution_str, ground_truth, extra_info, **arguments); returns a number, or a
    dict with the key score. Default: rlhpc.rewards.rules:maths."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function."""
    functions: list[RewardFunctionSection] = []
    """In place of function: several, each with a name, and the reward is the sum of their numbers times weights."""
    model: RewardModelSection | None = None
    """A reward model; without function and functions the only reward."""
    workers: PositiveInt = 2
    """Most processes that score the responses of one engine, beside it."""
    time_limit_seconds: PositiveFloat | None = None
    """Time limit of one call, in seconds, after which its process is killed; default: 5 for the functions of
    rlhpc.rewards.rules and rlhpc.rewards.formats, 30 for any other."""
    memory_limit_mib: PositiveInt | None = None
    """Memory that one call may allocate, in MiB, beyond what its process has when the call begins; default: 2048 for
    the functions of rlhpc.rewards, no limit for any other."""
    on_failure: Literal["error", "zero", "drop"] = "error"
    """When a function raises an exception or a reward is not a finite number: end the run, count that reward as 0, or
    drop the response from training."""
    on_timeout: Literal["error", "zero", "drop"] = "zero"
    """When a call of your own function exceeds its time or memory limit, or its process dies: the same choice. Such a
    call of a function of rlhpc.rewards always counts as 0."""

    @property
    def entries(self) -> list[RewardFunctionSection]:
        """The functions, also where a single one is given. Its name is empty."""
        if self.functions:
            return self.functions
        if self.model is not None and self.function is None:
            return []
        function = self.function or DEFAULT_FUNCTION
        return [RewardFunctionSection.model_construct(name="", function=function, arguments=self.arguments, weight=1.0)]
