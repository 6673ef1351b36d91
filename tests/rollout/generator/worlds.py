"""Generators of several engines in threads of one process, with an engine of words and a stand-in for the trainers.

Lenders are engines of words too, which the trainers' thread runs in turn when it has published a version.
The trainers publish a version as soon as they have its batch. What an engine samples depends on its weights' version,
and its log-probs on the requests beside: any change in the composition of an engine step shows.
tests/rollout/generator/test_separate.py has the real engine.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from rlhpc.api import Prompt, RunState
from rlhpc.config.schema import RunConfig
from rlhpc.core.folder import AttemptFolder
from rlhpc.data.prompts import Prompts, PromptSet
from rlhpc.parallel.board import Board
from rlhpc.rollout.generator.lending import continued
from rlhpc.rollout.generator.loop import Generator
from rlhpc.rollout.generator.messages import (
    Delivered,
    FinishedGroup,
    Lent,
    Published,
    Returned,
    StartPoint,
    Validated,
    Written,
    published_key,
    start_key,
)
from rlhpc.rollout.generator.parts import EnginePlace, FrozenModels, GeneratorParts, Links
from rlhpc.rollout.generator.state import held_groups
from rlhpc.rollout.requests import Sampling
from rlhpc.rollout.response_lengths import ResponseLengths, sampled_lengths
from rlhpc.rollout.schedule.terms import Terms, terms_of
from rlhpc.trainer.intake import Intake, make_intake
from tests.rollout.generator.words import SlowRewards, SlowTools, VersionWeights, WordEngine

PROMPTS = 13
HELD_OUT = 5
TURNS = {  # changes by which responses take turns, if their mean is 30 or more
    "rollout__dealing": "turns",
    "rollout__max_num_seqs": 4,
    "rollout__samples_per_prompt": 5,
    "rollout__max_response_tokens": 120,
}


def make_config(**changes: Any) -> RunConfig:
    """A run of 6 steps with 8 groups of 3 responses each; ``changes`` by dotted keys, with __ for the dot."""
    config: dict[str, Any] = {
        "name": "words",
        "model": {"path": "model"},
        "data": {"train": ["train.jsonl"]},
        "placement": "separate",
        "asynchrony": {
            "max_staleness": 1,
            "costs": {"step_seconds": 1.0, "sequence_seconds": 0.1, "train_seconds": 5.0, "tool_seconds": 3.0},
        },
        "rewards": [{"function": "rlhpc.rewards.rules:number"}],
        "rollout": {
            "ranks": 1,
            "samples_per_prompt": 3,
            "max_response_tokens": 40,
            "max_num_seqs": 8,
            "temperature": 0.9,
        },
        "train": {"steps": 6, "prompts_per_step": 8},
        "validation": {"samples_per_prompt": 2, "temperature": 0.5},
    }
    for key, value in copy.deepcopy(changes).items():
        section = config
        *parts, last = key.split("__")
        for part in parts:
            section = section.setdefault(part, {})
        section[last] = value
    return RunConfig.model_validate(config)


class Lines:
    """Channel and inbox in one process."""

    def __init__(self, log: list[Any]) -> None:
        self.sent: list[Any] = []
        self.inbox, self.failed, self._log = self, False, log

    def send(self, value: Any) -> None:
        self.sent.append(value)
        self._log.append(value)

    def check(self) -> None:
        if self.failed:
            raise RuntimeError("another thread has failed")


class End:
    """One end of a channel in one process, and its inbox."""

    def __init__(self, peer: int, log: list[Any] | None = None) -> None:
        self.peer, self.inbox, self.other = peer, self, self
        self.arrived: list[Any] = []
        self._log = [] if log is None else log

    def send(self, value: Any) -> None:
        self._log.append(value)
        self.other.arrived.append(copy.deepcopy(value))

    def take(self) -> list[tuple[int, Any]]:
        return [(self.peer, self.arrived.pop(0)) for _ in range(len(self.arrived))]


class Lenders:
    """All lenders, with a channel each to the engine whose requests they continue."""

    def __init__(self, config: RunConfig, terms: Terms, log: list[Any], *, delayed: bool, mean: int) -> None:
        section, self._terms, self._delayed, self._mean = config.rollout, terms, delayed, mean
        self._sampling = Sampling(section.max_response_tokens, section.temperature, section.top_p)
        self.ends = [End(100 + lender, log) for lender in range(terms.lenders)]  # those of the engines
        self._own = [End(lender) for lender in range(terms.lenders)]
        for end, own in zip(self.ends, self._own, strict=True):
            end.other, own.other = own, end
        self.lent: list[tuple[Lent, Returned | None]] = []

    def run(self, version: int, check: Callable[[], object]) -> None:
        """What all of them do with a version."""
        for own in self._own:
            while not own.arrived:
                check()
                time.sleep(0.001)
            ((_, lent),) = own.take()
            assert (lent.version, lent.policy_version) == (version, policy_of(version))
            engine = WordEngine(self._terms.slots, delayed=self._delayed, mean=self._mean)
            engine.version, engine.awake = version, ["weights", "cache"]
            returned = continued(engine, self._sampling, lent, self._terms) if lent.tasks else None  # type: ignore[arg-type]
            assert not engine.open
            self.lent.append((lent, returned))
            if returned is not None:
                own.send(returned)


@dataclass
class Outcome:
    """What the trainers have got: groups by number, how often each was delivered, answers by version, versions whose
    state each engine has written, batches in order."""

    groups: dict[int, FinishedGroup] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)
    validated: dict[int, list[Any]] = field(default_factory=dict)
    written: list[tuple[int, int]] = field(default_factory=list)
    batches: list[tuple[int, ...]] = field(default_factory=list)
    places: list[tuple[int, dict[str, Any] | None]] = field(default_factory=list)  # of the run after each batch
    activity: list[Any] = field(default_factory=list)
    lent: list[tuple[Lent, Returned | None]] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)  # all that engines have sent, in order


def run_world(
    config: RunConfig,
    engines: int,
    *,
    start: StartPoint | None = None,
    decide: Callable[[int], Mapping[str, Any]] = lambda version: {},
    tools: bool = False,
    greedy: bool = False,
    delayed: bool = False,
    mean: int = 12,
    lenders: int = 0,
    models: FrozenModels | None = None,
    seed: int = 0,
    attempt: AttemptFolder | None = None,
    arrival: dict[str, Any] | None = None,
) -> Outcome:
    """Runs all engines to their end. ``decide``: further fields of a version as it is published; ``mean``: tokens of a
    response that is not cut; ``models``: of every engine; ``seed``: of what is late in real time; ``attempt``: into
    which it is recorded, with arrival order; ``arrival``: RunState.arrival at the start."""
    log: list[Any] = []
    start, lines = start or StartPoint(0, 0), [Lines(log) for _ in range(engines)]
    store, terms = dist.HashStore(), terms_of(config, engines, lenders)
    lending = Lenders(config, terms, log, delayed=delayed, mean=mean)

    def engine(index: int) -> None:
        parts = GeneratorParts(
            config,
            EnginePlace(index, engines, leads=True, lenders=lenders),
            WordEngine(config.rollout.max_num_seqs, delayed=delayed, mean=mean),  # type: ignore[arg-type]
            SlowRewards(seed + index),  # type: ignore[arg-type]
            SlowTools(seed + index) if tools else None,
            prompt_set(PROMPTS),
            prompt_set(HELD_OUT),
            greedy,
            models,
        )
        channels = [lending.ends[lender] for lender in terms.lenders_of(index)]
        Generator(parts, Links(VersionWeights(), Board(store), lines[index], channels)).run()  # type: ignore[arg-type]

    def receive() -> list[Any]:
        lines[0].check()
        return [line.sent.pop(0) for line in lines for _ in range(len(line.sent))]

    def lend(version: int) -> None:
        lending.run(version, lines[0].check)

    intake = None
    if attempt is not None:
        state = RunState(step=start.version, prompt_cursor=start.prompt_cursor, arrival=arrival)
        checkpoint = Path(start.checkpoint) if start.checkpoint else None
        held = held_groups(checkpoint, terms.engines, terms.engines) if checkpoint is not None else []
        intake = make_intake(terms, state, Board(store), attempt, held, config.asynchrony.replay)
    trainers = Trainers(terms, Board(store), receive, start, decide, seed, lend, intake)
    trainers.prompts = prompt_set(PROMPTS), config.seed
    _run_together([trainers.run, *(lambda index=index: engine(index) for index in range(engines))], lines)
    trainers.read()
    trainers.outcome.lent, trainers.outcome.log = lending.lent, log
    return trainers.outcome


def _run_together(works: Sequence[Callable[[], object]], lines: Sequence[Lines]) -> None:
    """Runs all in threads of their own; the first that fails ends the others by their lines."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            for line in lines:
                line.failed = True

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert errors or not thread.is_alive(), "the engines and the trainers wait for each other"
    if errors:
        raise errors[0]


class Trainers:
    """Take batches in order and publish a version for each; check what they get."""

    def __init__(
        self,
        terms: Terms,
        board: Board,
        receive: Callable[[], Sequence[Any]],
        start: StartPoint,
        decide: Callable[[int], Mapping[str, Any]] = lambda version: {},
        seed: int = 0,
        lend: Callable[[int], object] = lambda version: None,
        intake: Intake | None = None,
    ) -> None:
        """``receive``: messages since the last call, or what ended an engine; ``lend``: what lenders do with a
        version."""
        self._lend = lend
        self._terms, self._board, self._receive, self._start, self._decide = terms, board, receive, start, decide
        self._random = random.Random(seed)
        state = RunState(step=start.version, prompt_cursor=start.prompt_cursor)
        self._intake = intake or Intake(terms, state, board)
        self.outcome = Outcome()
        self.prompts: tuple[PromptSet, int] | None = None  # with the run's seed, if engines know earlier lengths
        self._lengths = ResponseLengths()
        if start.checkpoint:
            self._lengths.load(Path(start.checkpoint))

    def run(self) -> None:
        """Until the last version is published."""
        version, cursor = self._start.version, self._start.prompt_cursor
        self._board.post(start_key(), self._start.to_json())
        while True:
            known, decided = {**self._intake.publish(version), **self._expected(cursor)}, self._decide(version)
            if decided.get("checkpoint") and Path(decided["checkpoint"]).is_dir():
                self._lengths.save(Path(decided["checkpoint"]))
            published = Published(version, policy_of(version), cursor, **known, **decided)
            self._board.post(published_key(version), published.to_json())
            if published.ends or version == self._terms.steps:
                return
            self._lend(version)
            while (batch := self._intake.take()) is None:
                time.sleep(0.001)
                self.read()
            kept = tuple(group.number for group in batch.kept)
            self._check(version, kept)
            self._lengths.record(sampled_lengths(one.group for one in (*batch.kept, *batch.dropped)))
            self.outcome.batches.append(kept)
            self.outcome.places.append((batch.end, batch.arrival))
            time.sleep(self._random.choice([0.0, 0.005]))
            version, cursor = version + 1, batch.end

    def _expected(self, cursor: int) -> dict[str, Any]:
        if self.prompts is None:
            return {}
        (prompts, seed), terms = self.prompts, self._terms
        taken, _ = prompts.take(cursor, (terms.max_staleness + 1) * (terms.batch_limit or terms.groups_per_step), seed)
        ratios = self._lengths.of_groups(cursor, [prompt.prompt_id for prompt in taken])
        return {"mean_tokens": self._lengths.mean, "length_ratios": ratios}

    def read(self) -> None:
        """Takes what the engines have sent."""
        for message in self._receive():
            match message:
                case Delivered():
                    self.outcome.activity.append(message.statistics)
                    self._intake.acts((message.engine, message.life), message.acts)
                    for group in message.groups:
                        self._take(group, (message.engine, message.life))
                case Validated():
                    self.outcome.validated.setdefault(message.version, []).extend(message.scored)
                case Written():
                    assert message.error is None, message.error
                    self._intake.acts((message.engine, message.life), message.acts)
                    self._intake.flush()
                    self.outcome.written.append((message.version, message.engine))

    def _take(self, group: FinishedGroup, source: tuple[int, int]) -> None:
        self.outcome.groups[group.number] = group
        self.outcome.times[group.number] = self.outcome.times.get(group.number, 0) + 1
        self._intake.add(group, source)

    def _check(self, step: int, groups: Sequence[int]) -> None:
        """No token of a step's groups is older than the bound."""
        for number in groups:
            group = self.outcome.groups[number]
            for sample in (*group.group.samples, *([group.greedy] if group.greedy is not None else [])):
                oldest = min(versions_of(sample))
                assert oldest >= policy_of(max(0, step - self._terms.max_staleness)), (step, number, oldest)
                assert max(versions_of(sample)) <= policy_of(step)


def policy_of(version: int) -> int:
    """The policy version of a schedule version: another number, so that none is taken for the other."""
    return 100 + version


def versions_of(sample: Any) -> list[int]:
    """The policy version of each token of a response."""
    versions: list[int] = (
        sample.token_versions.tolist()
        if sample.token_versions is not None
        else [sample.policy_version] * sample.response_len
    )
    assert versions[0] == sample.policy_version == min(versions)
    return versions


def prompt_set(size: int) -> PromptSet:
    rows = [Prompt(number, (), "source", "answer", {}) for number in range(size)]
    tokens = np.arange(100, 100 + 2 * size, dtype=np.int32)
    return PromptSet(Prompts(rows, tokens, np.arange(0, 2 * size + 1, 2)), 0, (range(size),), ("",))


def plain(group: FinishedGroup) -> Any:
    """All of a group, to be compared."""
    samples = [*group.group.samples, *([group.greedy] if group.greedy is not None else [])]
    return (
        group.number,
        group.keeps,
        (group.group.step, group.group.first_sample, group.group.dropped),
        (group.counts.tool_calls, group.counts.failed_tool_calls, dict(group.counts.reward_failures)),
        [
            (
                sample.tokens.tolist(),
                sample.log_probs.tobytes(),
                sample.reward,
                versions_of(sample),
                sample.truncated,
                None if sample.response_mask is None else sample.response_mask.tolist(),
                None if sample.routed_experts is None else sample.routed_experts.tolist(),
            )
            for sample in samples
        ],
    )
