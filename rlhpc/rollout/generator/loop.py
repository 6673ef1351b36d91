"""Generates on one engine from version to version, as its schedule decides.

On an engine of several ranks the first one decides, and broadcasts what to do; all of them do it alike. Only the first
knows the schedule, the rewards, the board and the trainers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhpc.core.heartbeat import touch
from rlhpc.rollout.collect import Collector, Stepped
from rlhpc.rollout.generator.lead import Beginning, Lead, RankOrder, ScoreGroups
from rlhpc.rollout.generator.lending import LentRequests
from rlhpc.rollout.generator.messages import FinishedGroup, Published
from rlhpc.rollout.generator.meter import ActivityMeter
from rlhpc.rollout.generator.numbering import Numbering, StepGroups
from rlhpc.rollout.generator.parts import GeneratorParts, Links
from rlhpc.rollout.generator.responses import EngineResponses, split_held_out
from rlhpc.rollout.generator.shelf import place_of
from rlhpc.rollout.generator.state import EngineState, load_state
from rlhpc.rollout.schedule.actions import Admit, Answer, End, EngineStep, GiveUp, Lend, Switch, TakeBack
from rlhpc.rollout.schedule.engine_order import EngineOrder
from rlhpc.rollout.schedule.terms import terms_of


class Generator:
    """One engine's part of a run: ``run`` generates until the run ends, or with the last version.

    It waits for the trainers only where its schedule needs a version that they have not published yet. Finished groups
    are sent at once and kept until the trainers have consumed them, within the bound of ``Shelf``. Collective over the
    ranks of the engine, on all of which ``run`` raises TrainersLost (see ``EnginePlace``).
    """

    def __init__(self, parts: GeneratorParts, links: Links) -> None:
        self._parts, self._weights = parts, links.weights
        self._terms = terms_of(parts.config, parts.place.engines, parts.place.lenders)
        self._meter = ActivityMeter()
        self._lending = LentRequests(self._terms, parts.place.engine, links.lenders)
        self._lead = Lead(parts, links, self._terms, self._meter, self._lending) if parts.place.leads else None
        self._ended = False
        self._to_validate: Published | None = None
        self._responses: EngineResponses
        self._collector: Collector | None = None

    def run(self) -> None:
        """Generates from the version where the attempt begins."""
        beginning = self._find_beginning()
        state = self._begin(beginning)
        if state is not None:
            self._responses.restore(state)
        if self._lead is not None:
            self._lead.begin(self._responses.collector, beginning, state)
        self._arrived(beginning.published)
        while not self._ended:
            for order in self._parts.place.agreed(self._decide) or []:
                self._do(order)

    def abandon(self) -> None:
        """Gives up what is in flight after TrainersLost, and lets the engine sleep. Collective like ``run``."""
        if self._collector is not None:
            self._collector.abandon()
        self._parts.engine.sleep()

    def _decide(self) -> list[RankOrder]:
        assert self._lead is not None, "the first rank decides"
        return self._lead.decide()

    def _find_beginning(self) -> Beginning:
        def find() -> Beginning | None:
            assert self._lead is not None, "the first rank finds it"
            return self._lead.find_beginning()

        while True:
            found = self._parts.place.agreed(find)
            if found is not None:
                return found

    def _begin(self, beginning: Beginning) -> EngineState | None:
        """Wakes the engine with the attempt's first version; the state that it resumes from."""
        parts, start, terms, state = self._parts, beginning.start, self._terms, None
        if start.checkpoint:
            state = load_state(Path(start.checkpoint), parts.place.engine, self._terms)
        seed, count = parts.config.seed, parts.config.rollout.samples_per_prompt
        steps = StepGroups(start.version, start.prompt_cursor, self._terms.groups_per_step)
        # An engine that comes back does not know in which step a group of the run's order would have been.
        in_order = parts.config.asynchrony.schedule == "deterministic" and not (terms.filtered or terms.elastic)
        numbering = Numbering(parts.prompts, seed, count, steps if in_order else None)
        dealing, groups = parts.config.rollout.dealing, self._terms.groups_per_step
        order = EngineOrder(dealing, groups) if dealing != "equal" else None
        self._responses = EngineResponses(parts, numbering, beginning.published, order)
        self._collector = self._responses.collector
        parts.engine.wake_weights()
        self._write(start.version)
        parts.engine.wake_cache()
        return state

    def _do(self, order: RankOrder) -> None:
        """Does what the first rank has decided."""
        match order.action:
            case Admit(group):
                held = self._responses.begin(group)
                if self._lead is not None:
                    self._lead.admitted(held)
            case EngineStep():
                self._step()
            case Answer(key):
                with self._meter.waits("tools"):
                    stepped = self._responses.collector.resume([place_of(key)])
                if self._lead is not None:
                    self._lead.answered(key, stepped)
            case Lend():
                self._lend(order.action)
            case TakeBack(lender):
                assert order.returned is not None
                stepped = self._responses.collector.take_back(order.returned.ended, order.returned.unfinished)
                if self._lead is not None:
                    self._lead.taken_back(lender, stepped)
            case GiveUp():
                self._responses.collector.forget_calls()
                if self._lead is not None:
                    self._lead.give_up()
            case ScoreGroups(groups):
                self._score(groups)
            case Switch():
                assert order.published is not None
                self._switch(order.published)
            case End():
                self._ended = True

    def _step(self) -> None:
        collector, late = self._responses.collector, self._responses.deal()
        running = min(collector.requests, self._terms.slots)
        stepped = late.then(collector.step())
        self._meter.stepped(running)
        if self._lead is not None:
            self._lead.stepped(running, stepped)

    def _lend(self, action: Lend) -> None:
        responses = self._responses
        count = self._lending.lend(responses.collector, action, responses.version, responses.policy_version)
        if self._lead is not None:
            self._lead.lent(count)
        self._validate()

    def _score(self, groups: Sequence[FinishedGroup]) -> None:
        """Lets the models beside the engine score groups, which are delivered then."""
        assert self._parts.models is not None
        touch("scoring by models", self._responses.version)
        with self._meter.scores():
            scored = self._parts.models.score(groups)
        if self._lead is not None:
            self._lead.deliver_scored(scored)

    def _switch(self, published: Published) -> None:
        """Takes over new weights. Requests compute their KV cache again at every checkpoint, in every run, so that a
        run that resumes from it equals one that does not."""
        preempts = self._terms.in_flight == "recompute" or bool(published.checkpoint)
        late: Stepped = self._responses.switch(published, preempts=preempts)
        self._write(published.version)
        if self._lead is not None:
            self._lead.switched(published, late)
        self._arrived(published)

    def _write(self, version: int) -> None:
        with self._meter.waits("weights"):
            self._parts.place.together(lambda: self._weights.wait(version))
        touch("weight sync", version)
        self._weights.write(self._parts.engine, version)

    def _arrived(self, published: Published) -> None:
        """Saves, validates and ends with a version, as the trainers have decided. Groups that the last step did not
        need are left unfinished. An engine with lenders validates when these have their requests."""
        place, engines = self._parts.place, published.engines
        if place.generation and place.engine not in (engines or ()):  # it was not there when this was published
            published = replace(published, checkpoint="", validates=False)
        if published.checkpoint:
            drafts = self._responses.collector.drafts()
            if self._lead is not None:
                self._lead.save(published, drafts)
        self._ended = published.ends or published.version == self._terms.steps
        self._to_validate = published if published.validates else None
        if self._ended or not self._terms.lenders_of(self._parts.place.engine):
            self._validate()

    def _validate(self) -> None:
        """Answers held-out prompts, if that is due."""
        published, self._to_validate = self._to_validate, None
        if published is None:
            return
        began = time.monotonic()
        found, held_out = split_held_out(self._responses.validate(published.engines))
        if self._lead is not None:
            self._lead.take(found)
        if self._parts.models is not None:
            held_out = self._parts.models.score_held_out(self._parts.place.shared(held_out))
        if self._lead is not None:
            self._lead.validated(published.version, held_out, time.monotonic() - began)
