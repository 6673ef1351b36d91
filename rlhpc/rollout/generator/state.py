"""An engine's part of a checkpoint: its schedule, its requests in the engine's order, and its groups.

engines/engine-00002.npz     the groups, as rlhpc.data.groups writes them
        engine-00002.json    the rest

They are written when the engine switches to the version of the checkpoint, as large as its groups
(``rlhpc.rollout.generator.shelf.Shelf``). The checkpoint is complete when all engines have written theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.files import make_folder, read_json, write_json
from rlhpc.core.folder import EnginesFolder
from rlhpc.core.storage import patiently
from rlhpc.data.groups import Group, load_groups, save_groups
from rlhpc.rollout.collect import Place
from rlhpc.rollout.generator.shelf import HeldGroup, call_key
from rlhpc.rollout.schedule.arrival import is_real_time
from rlhpc.rollout.schedule.states import redistributed
from rlhpc.rollout.schedule.terms import Terms


@dataclass(frozen=True)
class InFlightResponse:
    """A response in flight, whose draft is in its group. ``calls``: it waits for tools, which are called again."""

    group: int
    index: int
    calls: bool = False
    tool_calls: int = 0
    failed_tool_calls: int = 0


@dataclass(frozen=True)
class EngineState:
    """State that an engine resumes from, at its switch to ``version``. ``in_flight``: in the engine's order, those that
    wait for tools last. ``late_ends`` and ``late_calls``: groups that have ended and responses that wait for tools of
    which its schedule does not know yet."""

    version: int
    engine: int
    engines: int
    schedule: Mapping[str, Any]
    in_flight: Sequence[InFlightResponse] = ()
    groups: Sequence[HeldGroup] = ()
    late_ends: Sequence[int] = ()
    late_calls: Sequence[Place] = ()
    max_staleness: int = 0  # by which the groups were begun
    groups_per_step: int = 0

    def save(self, checkpoint: Path) -> None:
        """Writes it into a checkpoint's folder; raises OSError, also if a later attempt has removed the folder."""
        folder = EnginesFolder(checkpoint / EnginesFolder.NAME)
        make_folder(folder.path)
        greedy = [held.greedy for held in self.groups if held.greedy is not None]
        save_groups(folder.groups(self.engine), {"groups": [held.group for held in self.groups], "greedy": greedy})
        write_json(
            folder.state(self.engine),
            {
                "version": self.version,
                "engine": self.engine,
                "engines": self.engines,
                "schedule": dict(self.schedule),
                "in_flight": [asdict(response) for response in self.in_flight],
                "groups": [_record(held) for held in self.groups],
                "late_ends": list(self.late_ends),
                "late_calls": [list(place) for place in self.late_calls],
                "max_staleness": self.max_staleness,
                "groups_per_step": self.groups_per_step,
            },
        )


def load_state(checkpoint: Path, engine: int, terms: Terms) -> EngineState | None:
    """State of one of the engines of ``terms``; None if the checkpoint is of a run whose ranks generate and train, or
    if the engine was lost when it was written.

    With another number of engines than wrote it, groups go to the engine of their number, and requests keep their
    order, those of former engines interleaved. Nothing is lost, but responses are generated beside others than before.
    """
    folder = EnginesFolder(checkpoint / EnginesFolder.NAME)
    writers = folder.writers()
    if not writers:
        return None
    known = read_json(folder.state(writers[0]))
    _check_bound(known, terms)
    _check_order(known, terms)
    if int(known["engines"]) == terms.engines:
        return _load(folder, engine) if engine in writers else None
    states = [_load(folder, writer) for writer in writers]
    taken = [taken_over(states, taker, terms.engines) for taker in range(terms.engines)]
    if terms.order == "arrival":
        return taken[engine]
    requests = [sum(not response.calls for response in state.in_flight) for state in taken]
    calls = [[call_key((r.group, r.index)) for r in state.in_flight if r.calls] for state in taken]
    schedules = redistributed(terms, [state.schedule for state in states], requests, calls)
    return replace(taken[engine], schedule=schedules[engine])


def held_groups(checkpoint: Path, engines: int, resuming: int) -> list[int]:
    """The groups that the first ``resuming`` of the engines get from a checkpoint by ``load_state``, ascending."""
    folder = EnginesFolder(checkpoint / EnginesFolder.NAME)
    states = [read_json(folder.state(writer)) for writer in folder.writers()]
    found = [(state["engine"], held["number"], int(state["engines"])) for state in states for held in state["groups"]]
    takers = {number: writer if writers == engines else number % engines for writer, number, writers in found}
    return sorted(number for number, taker in takers.items() if taker < resuming)


def _check_order(known: Mapping[str, Any], terms: Terms) -> None:
    """Refuses to continue in virtual time what was begun without."""
    if terms.order == "deterministic" and is_real_time(known["schedule"]):
        raise UserError(
            "deterministic, but the checkpoint's groups were begun in the order of their arrival",
            where="asynchrony.schedule",
            remedy="set it back to arrival",
        )


def _check_bound(known: Mapping[str, Any], terms: Terms) -> None:
    """Refuses terms by which groups that have begun would be too old for their steps."""
    earlier, groups = known["max_staleness"], known["groups_per_step"]
    remedy = "set it back to {} or more, or resume with placement colocated until the next checkpoint"
    if earlier > terms.max_staleness:
        raise UserError(
            f"{terms.max_staleness}, but engines have begun groups that may be {earlier} steps old",
            where="asynchrony.max_staleness",
            remedy=remedy.format(earlier),
        )
    if groups > terms.groups_per_step and earlier:
        raise UserError(
            f"{terms.groups_per_step} new groups a step, but engines have begun groups of steps of {groups}, which "
            "would be older than asynchrony.max_staleness",
            where="train.prompts_per_step",
            remedy=remedy.format(f"{groups} new groups"),
        )


def taken_over(states: Sequence[EngineState], engine: int, engines: int) -> EngineState:
    """State of one of ``engines`` engines, from the parts that other engines wrote; without a schedule."""
    mine = [held for state in states for held in state.groups if held.group.number % engines == engine]
    placed = [item for state in states for item in enumerate(state.in_flight) if item[1].group % engines == engine]
    ordered = sorted(placed, key=lambda item: (item[1].calls, item[0], item[1].group))
    return EngineState(
        states[0].version,
        engine,
        engines,
        {},
        tuple(response for _, response in ordered),
        tuple(sorted(mine, key=lambda held: held.group.number)),
        tuple(group for state in states for group in state.late_ends if group % engines == engine),
    )


def _load(folder: EnginesFolder, engine: int) -> EngineState:
    record = read_json(folder.state(engine))
    file = folder.groups(engine)
    shelves = patiently(lambda: load_groups(file), file)
    greedy = {group.number: group for group in shelves["greedy"]}
    known = zip(shelves["groups"], record.pop("groups"), strict=True)
    groups = tuple(_held(group, greedy.get(group.number), counts) for group, counts in known)
    in_flight = tuple(InFlightResponse(**response) for response in record.pop("in_flight"))
    late_calls = tuple((group, index) for group, index in record.pop("late_calls"))
    return EngineState(**record, in_flight=in_flight, groups=groups, late_calls=late_calls)


def _record(held: HeldGroup) -> dict[str, Any]:
    return {
        "number": held.group.number,
        "tools": [held.tool_calls, held.failed_tool_calls],
        "reward_failures": dict(held.reward_failures),
        "keeps": held.keeps,
    }


def _held(group: Group, greedy: Group | None, known: Mapping[str, Any]) -> HeldGroup:
    assert group.number == known["number"]
    calls, failed = known["tools"]
    return HeldGroup(group, greedy, calls, failed, known["reward_failures"], known["keeps"])
