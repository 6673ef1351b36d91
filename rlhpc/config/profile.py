"""Profiles of a run's steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhpc.config.section import NonNegativeInt, PositiveInt, Section
from rlhpc.core.profiles import MOST_RANGES, Phase, Range, Selection, Tool, parse_ranges

_Part = Annotated[str, Field(pattern=r"^(all|[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9})?)?)$")]
_Steps = Annotated[str, Field(pattern=r"^[0-9]{1,9}(-[0-9]{1,9})?$")]


class ProfileSection(Section):
    """Profiles of chosen steps; `rlhpc profile` asks a running job for others. See docs/profiles.md."""

    steps: Annotated[list[PositiveInt | _Steps], Field(max_length=1000)] = []
    """RL steps to profile, such as [10, 40-42]; in a run without RL, warm-up steps. Default: none."""
    ranks: Annotated[list[NonNegativeInt | _Part], Field(min_length=1, max_length=MOST_RANGES)] = [0]
    """Ranks to profile, such as [0, 8-15]; [0-95:8] for every eighth, or [all]."""
    phases: list[Phase] = []
    """Phases of a step to profile; default: the whole step."""
    tools: Annotated[list[Tool], Field(min_length=1)] = ["torch"]
    """Tools to profile with: torch (trace), memory (snapshots of GPU memory), nsys (Nsight Systems), nvtx (ranges of
    phases and layers), py-spy (stacks)."""
    max_mib: PositiveInt = 4096
    """Maximum size of profiles/ in the run folder, in MiB: half for the newest step; the oldest are deleted for the
    rest."""

    @property
    def rank_ranges(self) -> tuple[Range, ...]:
        return parse_ranges(self.ranks, "profile.ranks")

    @property
    def selections(self) -> tuple[Selection, ...]:
        """Profiles that the section asks for. Raises UserError."""
        parts = (self.rank_ranges, tuple(self.phases), tuple(self.tools))
        return tuple(Selection(part.first, part.last, *parts) for part in parse_ranges(self.steps, "profile.steps"))
