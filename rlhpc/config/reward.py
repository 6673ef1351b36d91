"""The list of rewards, and the section of the processes that compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from rlhpc.config.section import ImportPath, PositiveInt, PositiveSeconds, Section
from rlhpc.config.training import FrozenMemorySection, ParallelSection

DEFAULT_FUNCTION = "rlhpc.rewards.rules:maths"

NO_KIND = "no_kind"  # type of the error where an entry has both or neither of function and model

PartName = Annotated[str, Field(pattern=r"^\w+$")]


class RewardFunctionSection(Section):
    """A Python function that scores a response."""

    function: ImportPath
    """Import path of a function called as function(data_source, solution_str, ground_truth, extra_info, **arguments),
    which returns a number or a dict with the key score."""
    name: PartName | None = None
    """Name of this part of the reward in metrics and sample records; required with several functions."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function."""
    weight: float = 1.0
    """Weight in the sum of all rewards."""
    time_limit_seconds: PositiveSeconds | None = None
    """Time limit of one call of this function, in seconds; default: as for reward_workers.time_limit_seconds."""


class RewardModelSection(Section):
    """A sequence classifier with one label, as HuggingFace saves it, over the tokens of prompt and response."""

    model: Path
    """Path to the reward model's folder."""
    name: PartName = "model"
    """Name of this part of the reward in metrics and sample records."""
    weight: float = 1.0
    """Weight in the sum of all rewards."""
    on: Literal["trainers", "judges", "engines"] = "trainers"
    """Ranks that have it: those that train, judges (their own), or each engine. Others than trainers need placement
    separate or lend."""
    parallel: ParallelSection | None = None
    """Parallel layout; default: the actor's. With the engines tp is rollout.tp."""
    memory: FrozenMemorySection | None = None
    """Memory savings; default: the reference's."""
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


def _kind(entry: Any) -> str | None:
    """Tag of the class of an entry, None where it has both or neither of function and model."""
    if isinstance(entry, RewardFunctionSection | RewardModelSection):
        return type(entry).__name__
    kinds = {"function": "RewardFunctionSection", "model": "RewardModelSection"}
    found = [kind for key, kind in kinds.items() if isinstance(entry, dict) and key in entry]
    return found[0] if len(found) == 1 else None


# A tag is the name of its class, so that an error's location names the class (rlhpc/config/load.py).
RewardEntry = Annotated[
    Annotated[RewardFunctionSection, Tag("RewardFunctionSection")]
    | Annotated[RewardModelSection, Tag("RewardModelSection")],
    Discriminator(_kind, custom_error_type=NO_KIND, custom_error_message="needs either function or model"),
]


class RewardWorkersSection(Section):
    """Processes beside the engines that call reward functions."""

    per_engine: PositiveInt = 2
    """Maximum reward workers beside each engine."""
    time_limit_seconds: PositiveSeconds | None = None
    """Time limit of one call, in seconds; default: 5 for the functions of rlhpc.rewards.rules and
    rlhpc.rewards.formats, 30 for any other."""
    memory_limit_mib: PositiveInt | None = None
    """Memory that one call may allocate, in MiB; default: 2048 for the functions of rlhpc.rewards, no limit for any
    other."""
    on_failure: Literal["error", "zero", "drop"] = "error"
    """Action when a function raises or any reward is not finite: end the run (error), count it as 0, or drop the
    response."""
    on_timeout: Literal["error", "zero", "drop"] = "zero"
    """Action when a call of your own function exceeds its time or memory limit, or its process dies, as on_failure."""
