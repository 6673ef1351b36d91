"""The section of rewards."""

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
    """Name of this part of the reward in metrics and sample records."""
    function: ImportPath
    """Import path, as reward.function."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function."""
    weight: float = 1.0
    """Weight in the sum."""
    time_limit_seconds: PositiveFloat | None = None
    """Time limit of one call of this function, in seconds; default: as for reward.time_limit_seconds."""


class RewardModelSection(Section):
    """A sequence classifier with one label, as HuggingFace saves it, over the tokens of prompt and response."""

    path: Path
    """Path to the reward model's folder."""
    weight: float = 1.0
    """Weight in the sum with the functions' rewards."""
    parallel: ParallelSection | None = None
    """Parallel layout; default: the actor's."""
    tokens_per_microbatch: PositiveInt | None = None
    """Maximum tokens per rank in one forward pass; default: train.log_prob_tokens_per_microbatch."""
    own_tokenizer: bool | None = None
    """Rendering of conversations with the reward model's tokenizer and chat template instead of the policy's tokens;
    default: true where the vocabularies differ."""
    chat_template: bool | Path = True
    """Chat template with its own tokenizer: its folder's (true), a Jinja file, or none (false): prompt and response
    verbatim."""
    max_tokens: PositiveInt | None = None
    """Maximum tokens of a conversation; default: the model's positions."""
    too_long: Literal["error", "truncate"] = "error"
    """Action on a longer conversation: end the run (error), or drop its beginning (truncate)."""


class RewardSection(Section):
    function: ImportPath | None = None
    """Import path of a function called as function(data_source, solution_str, ground_truth, extra_info, **arguments),
    which returns a number or a dict with the key score; default: rlhpc.rewards.rules:maths."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function."""
    functions: list[RewardFunctionSection] = []
    """Several functions in place of function, each with a name; the reward is their weighted sum."""
    model: RewardModelSection | None = None
    """Reward model; the only reward without function and functions."""
    workers: PositiveInt = 2
    """Maximum reward workers beside each engine."""
    time_limit_seconds: PositiveFloat | None = None
    """Time limit of one call, in seconds, after which its process is killed; default: 5 for the functions of
    rlhpc.rewards.rules and rlhpc.rewards.formats, 30 for any other."""
    memory_limit_mib: PositiveInt | None = None
    """Memory that one call may allocate, in MiB, beyond what its process has when the call begins; default: 2048 for
    the functions of rlhpc.rewards, no limit for any other."""
    on_failure: Literal["error", "zero", "drop"] = "error"
    """Action when a function raises or a reward is not finite: end the run (error), count it as 0, or drop the response
    from training."""
    on_timeout: Literal["error", "zero", "drop"] = "zero"
    """Action when a call of your own function exceeds its time or memory limit, or its process dies, as on_failure.
    Such a call of a function of rlhpc.rewards always counts as 0."""

    @property
    def entries(self) -> list[RewardFunctionSection]:
        """The functions, also where a single one is given. Its name is empty."""
        if self.functions:
            return self.functions
        if self.model is not None and self.function is None:
            return []
        function = self.function or DEFAULT_FUNCTION
        return [RewardFunctionSection.model_construct(name="", function=function, arguments=self.arguments, weight=1.0)]
