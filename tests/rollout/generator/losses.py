"""A world of generators of which some are lost at a random moment, and perhaps come back, beside the trainers' desk."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhpc.api import RunState
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import PeerLost
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.store_client import LOST_ENGINES
from rlhpc.observe.engine_activity import EngineActivity
from rlhpc.parallel.board import Board
from rlhpc.rollout.generator.loop import Generator
from rlhpc.rollout.generator.messages import Delivered, FinishedGroup
from rlhpc.rollout.generator.parts import EnginePlace, GeneratorParts, Links
from rlhpc.rollout.schedule.terms import terms_of
from rlhpc.trainer.engine_desk import EngineDesk, Link
from rlhpc.trainer.intake import Batch
from rlhpc.trainer.rejoin import Joining
from tests.rollout.generator.words import SlowRewards, SlowTools, VersionWeights, WordEngine
from tests.rollout.generator.worlds import HELD_OUT, PROMPTS, policy_of, prompt_set, versions_of

PATIENCE = 60.0  # seconds for a batch or an answer


class Killed(Exception):
    """An engine's end."""


class MortalEngine(WordEngine):
    """Ends its generator at a step. ``steps``: how many it makes; ``seconds``: of each; ``mean``: see WordEngine."""

    def __init__(self, slots: int, steps: int, seconds: float = 0.0, mean: int = 12) -> None:
        super().__init__(slots, mean=mean)
        self.left, self._seconds = steps, seconds

    def step(self) -> Any:
        time.sleep(self._seconds)
        self.left -= 1
        if not self.left:
            raise Killed
        return super().step()


class Wires:
    """Inbox of the trainers, and the ends of its channels to engines."""

    def __init__(self) -> None:
        self._changed, self._arrived, self._gone = threading.Condition(), list[tuple[int, Any]](), dict[Any, PeerLost]()
        self.error: BaseException | None = None

    def put(self, peer: int, value: Any) -> None:
        with self._changed:
            self._arrived.append((peer, value))

    def lose(self, wire: Wire, *, unsent: int) -> None:
        """``unsent``: of its newest messages, those that never arrive."""
        peer = wire.peer
        with self._changed:
            own = [place for place, (sender, _) in enumerate(self._arrived) if sender == peer]
            for place in reversed(own[len(own) - unsent :] if unsent else []):
                del self._arrived[place]
            self._gone[wire] = PeerLost(f"engine {peer}")

    def take(self) -> list[tuple[int, Any]]:
        self.check()
        with self._changed:
            arrived, self._arrived = self._arrived, []
            return arrived

    def gone(self) -> dict[Any, PeerLost]:
        with self._changed:
            gone, self._gone = self._gone, {}
            return gone

    def wait(self, seconds: float, phase: str = "") -> bool:
        time.sleep(0.001)
        return True

    def check(self) -> None:
        if self.error is not None:
            raise RuntimeError("another thread has failed") from self.error


@dataclass(eq=False)
class Wire:
    """Both ends of the channel between the trainers and one engine."""

    wires: Wires
    peer: int
    closed: bool = False

    @property
    def inbox(self) -> Wire:
        return self

    def check(self) -> None:
        if self.closed:
            raise Killed
        self.wires.check()

    def send(self, value: Any) -> None:
        if not self.closed:
            self.wires.put(self.peer, value)

    def drop(self) -> None:
        self.closed = True

    close = drop


@dataclass
class Losses:
    """Engine steps after which engines are lost, by engine; ``back``: those that come back; ``unsent``: newest messages
    of a lost one that never arrive; ``seed``: of what is late in real time; ``slow``: seconds of an engine step in the
    first life of an engine; ``limit``: for which one may hold up a step."""

    steps: dict[int, int] = field(default_factory=dict)
    back: tuple[int, ...] = ()
    unsent: int = 0
    seed: int = 0
    slow: Mapping[int, float] = field(default_factory=dict)
    limit: float | None = None


@dataclass(frozen=True)
class Resumed:
    """A checkpoint, and the state of the run in it."""

    state: RunState
    checkpoint: Path


@dataclass
class Survived:
    """What the trainers have got."""

    batches: list[Batch] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)  # number, by version
    lost: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    saved: dict[int, Resumed] = field(default_factory=dict)

    @property
    def groups(self) -> dict[int, FinishedGroup]:
        return {one.number: one for batch in self.batches for one in batch.kept}

    @property
    def times(self) -> Counter[int]:
        return Counter(one.number for batch in self.batches for one in batch.kept)


class LossyWorld:
    """Engines in threads, and the trainers in this one."""

    def __init__(self, config: RunConfig, engines: int, attempt: AttemptFolder, losses: Losses) -> None:
        self._config, self._engines, self._losses, self._tools = config, engines, losses, config.rollout.max_turns > 1
        self._store, self._wires = dist.HashStore(), Wires()
        self._attempt, self._random = attempt, random.Random(losses.seed)
        self._terms = terms_of(config, engines)
        self._generations: Counter[int] = Counter()
        self._dead: list[int] = []
        self.survived = Survived()

    def run(
        self, validates: tuple[int, ...] = (), saves: Mapping[int, Path] | None = None, resumed: Resumed | None = None
    ) -> Survived:
        """``saves``: checkpoint folders by version; ``resumed``: where a run goes on."""
        channels = [self._start(engine, self._losses.steps.get(engine, 0)) for engine in range(self._engines)]
        activity = EngineActivity([*range(self._engines)])
        link = Link(Board(self._store), self._wires, channels, activity, self._attempt)  # type: ignore[arg-type]
        limit = self._losses.limit
        self.desk = EngineDesk(self._terms, link, self._config.asynchrony.replay, slow_engine_seconds=limit)
        state, checkpoint = (replace(resumed.state), resumed.checkpoint) if resumed is not None else (RunState(), None)
        self.desk.begin(state, checkpoint)
        while True:
            state.policy_version = policy_of(state.step)
            ends = state.step == self._terms.steps
            folder = (saves or {}).get(state.step)
            self.desk.publish(state, checkpoint=folder, validates=state.step in validates, ends=ends)
            if folder is not None:
                self._wait(partial(self._written, state.step), state)
                self.survived.saved[state.step] = Resumed(replace(state), folder)
            if state.step in validates:
                self.survived.answers[state.step] = len(self._wait(lambda: self.desk.answers(state.step, 0.001), state))
            if ends:
                return self.survived
            batch = self._wait(lambda: self.desk.batch(0.001), state)
            self._check(state.step, batch)
            self.survived.batches.append(batch)
            time.sleep(self._random.choice([0.0, 0.005]))
            state.step, state.prompt_cursor, state.arrival = state.step + 1, batch.end, batch.arrival

    @property
    def given_up(self) -> dict[str, Any]:
        """What the trainers say of engines that they have given up."""
        found: dict[str, Any] = Board(self._store).read([LOST_ENGINES])[LOST_ENGINES]
        return found

    def _wait(self, find: Any, state: RunState) -> Any:
        deadline = time.monotonic() + PATIENCE
        while (found := find()) is None:
            assert time.monotonic() < deadline, "the engines and the trainers wait for each other"
            for engine in [one for one in self._dead if one in self._losses.back]:
                self._dead.remove(engine)
                self._generations[engine] += 1
                self.desk.join(Joining(engine, self._generations[engine]), self._start(engine, 0))  # type: ignore[arg-type]
                self.survived.joined.append(engine)
        return found

    def _written(self, version: int) -> bool | None:
        return self.desk.written(version) or None

    def _check(self, step: int, batch: Batch) -> None:
        """No token is older than the bound."""
        for one in batch.kept:
            for sample in one.group.samples:
                assert min(versions_of(sample)) >= policy_of(max(0, step - self._terms.max_staleness)), (
                    step,
                    one.number,
                )
                assert max(versions_of(sample)) <= policy_of(step)

    def _start(self, engine: int, steps: int) -> Wire:
        wire = Wire(self._wires, engine)
        threading.Thread(target=self._guarded, args=(engine, wire, steps), daemon=True).start()
        return wire

    def _guarded(self, engine: int, wire: Wire, steps: int) -> None:
        try:
            self._generate(engine, wire, steps)
        except Killed:
            self._wires.lose(wire, unsent=self._losses.unsent)
            self.survived.lost.append(engine)
            self._dead.append(engine)
        except BaseException as error:
            self._wires.error = error

    def _generate(self, engine: int, wire: Wire, steps: int) -> None:
        seed, config = self._losses.seed + engine, self._config
        mean = 60 if config.rollout.dealing == "turns" else 12  # longer than a turn
        slow = self._losses.slow.get(engine, 0.0) if not self._generations[engine] else 0.0
        place = EnginePlace(engine, self._engines, leads=True, generation=self._generations[engine])
        parts = GeneratorParts(
            config,
            place,
            MortalEngine(config.rollout.max_num_seqs or 8, steps, slow, mean),  # type: ignore[arg-type]
            SlowRewards(seed),  # type: ignore[arg-type]
            SlowTools(seed) if self._tools else None,
            prompt_set(PROMPTS),
            prompt_set(HELD_OUT),
        )
        Generator(parts, Links(VersionWeights(), Board(self._store), wire)).run()  # type: ignore[arg-type]


def delivered(message: Any) -> list[int]:
    """Groups of a message."""
    return [one.number for one in message.groups] if isinstance(message, Delivered) else []
