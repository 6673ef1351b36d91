"""Messages between engines and trainers on ranks of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlhpc.api import Sample
from rlhpc.data.groups import Group
from rlhpc.rollout.collect import Scored
from rlhpc.rollout.requests import Task
from rlhpc.rollout.schedule.acts import Act

ROLL_CALL_KEY = "roll_call"  # of the newest RollCall


def start_key(engine: int = 0, generation: int = 0) -> str:
    """Key on the board under which the trainers' first rank posts where the attempt begins (``StartPoint``), or where
    an engine begins that was started again."""
    return f"start/{engine}/{generation}" if generation else "start"


def published_key(version: int) -> str:
    """Key on the board under which the trainers' first rank posts a version (``Published``)."""
    return f"published/{version}"


def news_key(engine: int) -> str:
    """Key on the board under which the first rank of an engine posts what the schedules of the others must know."""
    return f"engine/{engine}/news"


@dataclass(frozen=True)
class StartPoint:
    """Beginning of an attempt of the run. The trainers' first rank posts it on the board before it publishes
    ``version``, the first one of the attempt."""

    version: int
    prompt_cursor: int  # RunState.prompt_cursor: number of the first group that is not consumed
    checkpoint: str = ""  # folder of the checkpoint that is resumed; "" for none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StartPoint:
        return cls(**record)


@dataclass(frozen=True)
class Published:
    """New weights, as the trainers' first rank posts them on the board: those after ``version`` RL steps."""

    version: int
    policy_version: int  # RunState.policy_version: of these steps, those that changed the weights
    prompt_cursor: int  # RunState.prompt_cursor: groups before this number have been consumed
    checkpoint: str = ""  # folder in which engines write their state when they switch to it; "" for none
    validates: bool = False  # whether engines answer the held-out prompts with it
    ends: bool = False  # whether the run ends with it
    engines: Sequence[int] | None = None  # those that validate and save; None: all
    done: Sequence[int] = ()  # with schedule arrival: groups that its step has consumed, from prompt_cursor on too
    mean_tokens: float = 0.0  # of a response in its step; 0: not known
    length_ratios: Sequence[tuple[int, float]] = ()  # groups, and what their prompts' earlier responses had over it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Published:
        ratios = tuple((group, ratio) for group, ratio in record["length_ratios"])
        return cls(**{**record, "done": tuple(record["done"]), "length_ratios": ratios})


@dataclass(frozen=True)
class GroupCounts:
    """Counts of the responses of a group; of greedy ones only ``reward_failures``."""

    tool_calls: int = 0
    failed_tool_calls: int = 0
    reward_failures: Mapping[str, int] = field(default_factory=dict)  # by kind


@dataclass(frozen=True)
class FinishedGroup:
    """A group of which all responses are scored, with the greedy response to its prompt if the algorithm needs one.

    ``keeps``: it has samples, and the filter of dynamic sampling accepts it; otherwise it is not trained on. ``greedy``
    is None too if its reward failed and dropped it. If models beside the engine score groups, they have done so before
    it is delivered; the filter does not know their part of the rewards.
    """

    number: int  # place of the prompt in the run's order
    group: Group
    keeps: bool
    greedy: Sample | None = None
    counts: GroupCounts = GroupCounts()


@dataclass(frozen=True)
class Activity:
    """Activity of an engine since its last message. ``idle``: seconds by what it waited for: weights, engines, tools,
    rewards, models (beside it, which score groups), trainers (until they return lent requests)."""

    seconds: float  # wall time
    idle: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0  # sampled: one for each running request of a step
    steps: int = 0  # of the engine
    statistics: Mapping[str, float] = field(default_factory=dict)  # of RolloutEngine and Collector

    @property
    def idle_seconds(self) -> float:
        """Seconds in which the engine waited."""
        return sum(self.idle.values())


@dataclass(frozen=True)
class Delivered:
    """Groups that an engine has finished since its last message, in the order of their numbers. After a resumption it
    delivers again those that the trainers may not have trained on."""

    engine: int
    groups: Sequence[FinishedGroup]
    statistics: Activity
    version: int  # of the engine's weights
    acts: Sequence[Act] = ()  # what the engine has done since its last message
    life: int = 0  # how often it was started before in this attempt; in a replay, in the recorded run


@dataclass(frozen=True)
class Validated:
    """One engine's share of the answers to the held-out prompts, with the weights of a version. ``scored`` is in the
    prompts' order; their groups are places among ``PromptSet.first(validation.max_prompts)``."""

    engine: int
    version: int
    scored: Sequence[Scored]
    seconds: float = 0.0  # that it took


@dataclass(frozen=True)
class Written:
    """An engine has written its part of the checkpoint of a version, or failed with ``error``. ``acts`` and ``life``:
    see Delivered; a record that ends with this checkpoint needs them."""

    engine: int
    version: int
    error: OSError | None = None
    acts: Sequence[Act] = ()
    life: int = 0


@dataclass(frozen=True)
class RollCall:
    """After the loss of an engine the trainers' first rank asks the others which groups they have. From then on all
    follow the order of arrival."""

    number: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RollCall:
        return cls(**record)


@dataclass(frozen=True)
class Held:
    """An engine's answer to a roll call: groups that it has, with those that it has drawn and not started."""

    engine: int
    number: int
    groups: Sequence[int]


@dataclass(frozen=True)
class Lent:
    """Requests that an engine gives a lender, an engine on trainers' ranks, when it has a version: one such message for
    each version, perhaps without requests. ``nanoseconds``: virtual time for which the lender continues them."""

    version: int
    policy_version: int
    nanoseconds: int
    tasks: Sequence[Task]


@dataclass(frozen=True)
class Returned:
    """A lender's results of a version's requests, each part in the order in which it got them: those whose turn has
    ended, and the others."""

    version: int
    ended: Sequence[Task]
    unfinished: Sequence[Task]


Message = Delivered | Validated | Written | Held
