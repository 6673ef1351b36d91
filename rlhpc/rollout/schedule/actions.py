"""Next actions of an engine, as its schedule decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """Take over the weights of ``version`` (the number of RL steps behind them), one more than before; wait until they
    are here. Then call ``switched``."""

    version: int


@dataclass(frozen=True)
class Admit:
    """Start all responses of ``group``; then call ``admitted``."""

    group: int


@dataclass(frozen=True)
class Answer:
    """Take the answer of the tool call ``key``, waiting for it if need be; then call ``answered``."""

    key: int


@dataclass(frozen=True)
class Lend:
    """Withdraw the last ``requests`` x lenders requests in the engine's order, and give each of its lenders, in their
    order, so many of them, which they continue for ``nanoseconds`` of virtual time. Once per version, perhaps none.
    Then call ``lent``."""

    requests: int
    nanoseconds: int


@dataclass(frozen=True)
class TakeBack:
    """Take back the requests that ``lender`` has, waiting for them if need be: in the order in which it got them, those
    whose turn has ended as ended now, the others continued after the engine's own. Then call ``taken_back``."""

    lender: int


@dataclass(frozen=True)
class GiveUp:
    """Forget all groups, of which none has a request left; then call ``gave_up``. In a replay, where the engine was
    lost."""


@dataclass(frozen=True)
class EngineStep:
    """Generate a token of every running request; then call ``stepped``."""


@dataclass(frozen=True)
class AwaitNews:
    """Nothing can be decided before ``learn`` or ``judged`` brings something new.

    ``verdicts``: ended groups of this engine whose verdicts may be what is missing.
    """

    verdicts: tuple[int, ...] = ()


@dataclass(frozen=True)
class End:
    """All versions have been taken over; nothing is left to generate."""


Action = Switch | Admit | Answer | Lend | TakeBack | GiveUp | EngineStep | AwaitNews | End
