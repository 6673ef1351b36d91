"""The run from its first step to its last: phases, validation, checkpoints, metrics."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

from rlhpc.api import BackgroundWrite, RunState
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.core.context import Reason
from rlhpc.core.errors import UserError
from rlhpc.core.files import make_folder
from rlhpc.core.heartbeat import enter, touch
from rlhpc.core.storage import exists
from rlhpc.parallel.agreement import check_job_agreement, on_first_rank
from rlhpc.sharding.placement import placement_of
from rlhpc.trainer.best import best_value, forget_lost_best, note_validation
from rlhpc.trainer.engine_side import StoppedWaiting
from rlhpc.trainer.evaluate import check_finite_weights
from rlhpc.trainer.export import Exporter
from rlhpc.trainer.judge_side import JudgeSide
from rlhpc.trainer.observer import Observer
from rlhpc.trainer.profiles import Profiles
from rlhpc.trainer.publisher import Publisher
from rlhpc.trainer.run import Run
from rlhpc.trainer.step import find_step, sft_step, take_step
from rlhpc.trainer.stop import Stopper
from rlhpc.trainer.times import RunTimer
from rlhpc.trainer.update import Metrics


@dataclass(frozen=True)
class _Published:
    """Decisions for a step whose weights are published: why the run stops, its record's validation, whether a
    checkpoint is due, and whether one is asked for."""

    reason: Reason
    validated: Metrics
    due: bool
    asked: bool


class Loop:
    """Continues a run from its newest checkpoint. ``saves_end``: it writes a checkpoint after the last step."""

    def __init__(self, run: Run, *, saves_end: bool = True) -> None:
        self._run, self._config, self._saves_end = run, run.config, saves_end
        self._rl_step = find_step(run.config)
        self._store = CheckpointStore(run.context.attempt, self._config.checkpoint.keep)
        self._saved = -1
        self._timer = RunTimer(run.context, run.models)
        self._resumed: Path | None = None  # checkpoint
        self.state = self._restore()
        run.context.attempt.check_current()
        self._observer = Observer(run, self.state)
        self._profiles = Profiles(run.config, run.context, run.models.settle)
        minutes = self._config.checkpoint.every_minutes
        self._stopper = Stopper(run.context, self._profiles, every_seconds=None if minutes is None else 60 * minutes)
        if run.engines is not None:
            run.engines.agree_to_stop = lambda: self._stopper.agree()[0]
        self._publisher = self._make_publisher()
        self._total = (self._config.sft.steps if self._config.sft else 0) + self._config.train.steps
        self._exporter = Exporter(run.config, run.actor, run.context.info.rank, self._store, self._total)

    def run(self) -> Reason | None:
        """Runs all remaining steps, or until the ranks agree to stop; returns the reason. Saves at the end."""
        try:
            self._timer.started()
            if self._resumed is not None:
                self._exporter.resume(self.state)
            try:
                reason = self._run_phases()
            except StoppedWaiting as stopped:
                reason = stopped.reason
            if self._saved != self.state.total_steps and (self._saves_end or reason is not None):
                self._save()
            self._finish_saves()
            if reason is None:
                self._export()
            if self._run.engines is not None:
                self._run.engines.end(reason)
            if self._run.judges is not None:
                self._run.judges.end(reason)
            return reason
        finally:
            self._observer.close()

    def _run_phases(self) -> Reason | None:
        sft, train, state = self._config.sft, self._config.train, self.state
        while sft and state.sft_step < sft.steps:
            self._stopper.begin()
            self._profiles.begin("sft", state.sft_step + 1)
            self._observer.begin()
            began = time.perf_counter()
            metrics, validated = sft_step(self._run, state), {}
            self._profiles.end()
            state.sft_step += 1
            if state.sft_step == sft.steps and not train.steps:
                validated = self._validate()
            self._observer.step("sft", state.sft_step, sft.steps, {**metrics, **validated}, began)
            if (reason := self._after_step(validated)) != "none":
                return reason
        if train.steps and state.step < train.steps:
            self._begin_rl()
        while state.step < train.steps:
            self._stopper.begin()
            self._profiles.begin("rl", state.step + 1)
            self._observer.begin()
            began = time.perf_counter()
            metrics, validated = take_step(self._rl_step, self._run, state), {}
            self._profiles.end()
            seconds = time.perf_counter() - began
            published = self._publish() if self._publisher is not None else None
            if published is not None:
                validated = published.validated
            elif state.step % self._config.validation.every == 0 or state.step == train.steps:
                validated = self._validate()
            if published is not None or validated:
                began = time.perf_counter() - seconds  # a step's time is without its validation
            self._observer.step("rl", state.step, train.steps, {**metrics, **validated}, began)
            reason = self._after_step(validated) if published is None else self._after_publishing(published)
            if reason != "none":
                return reason
        return None

    def _begin_rl(self) -> None:
        """RL starts from the warmed-up weights, which are its reference, with a new optimizer. Engines on ranks of
        their own begin, also in a resumed run."""
        run, started = self._run, self.state.step > 0
        if started and self._publisher is None:
            return
        if self._config.sft and not started:
            run.actor.reset_optimizer(self._config.actor.optimizer)
            if run.reference is not None:
                run.reference.copy_weights(run.actor)
                run.reference.offload()
            if run.critic is not None and self._config.critic.path is None:
                run.critic.take_tensors(run.actor.full_tensors())
                run.critic.offload()
            if run.judges is not None:
                self._give_weights(run.judges)
        metrics = self._validate() if self._publisher is None else self._publisher.begin(self._resumed)
        best_value(self._config.checkpoint, metrics)  # that there is one; these weights are not compared
        if metrics:
            self._observer.step("rl", 0, self._config.train.steps, metrics, time.perf_counter())

    def _give_weights(self, judges: JudgeSide) -> None:
        """Models of judges that begin RL with the actor's weights take them."""
        begin = {"reference": True, "critic": self._config.critic.path is None}
        for model in judges.models:
            if begin.get(model):
                judges.take_weights(model, self._run.actor.full_tensors())

    def _validate(self) -> Metrics:
        evaluator = self._run.evaluator
        return evaluator.validate(self._run.actor, self.state) if evaluator is not None else {}

    def _after_step(self, validated: Metrics) -> Reason:
        """Saves if due or if the step is the best one, and agrees with the other ranks whether to stop; not after the
        last step."""
        self._profiles.write()
        self._stopper.stepped()
        self._settle(wait=False)
        every = self._config.checkpoint.every
        best = note_validation(self._config.checkpoint, self.state, validated)
        if best or (every and self.state.total_steps % every == 0):
            self._save(asynchronous=self._config.checkpoint.asynchronous)
        if self.state.total_steps == self._total:
            return "none"
        self._export()
        reason, saves = self._stopper.agree()
        due = self._stopper.due and reason == "none"
        if (saves or due) and self._saved != self.state.total_steps:
            # One that is asked for is waited for: it shows that saving works, and how long it takes.
            self._save(asynchronous=self._config.checkpoint.asynchronous and not saves)
            if reason == "none":
                self._export()
        return reason

    def _make_publisher(self) -> Publisher | None:
        run = self._run
        if run.engines is None:
            return None
        return Publisher(run.config, run.models, run.evaluator, run.engines, self._store, self.state)

    def _publish(self) -> _Published:
        """Decides whether the run stops or saves after this step, and publishes its weights."""
        assert self._publisher is not None
        self._profiles.write()
        self._stopper.stepped()
        self._settle(wait=False)
        last = self.state.step == self._config.train.steps
        reason: Reason = "none"
        asked = False
        if not last:
            reason, asked = self._stopper.agree(self._publisher.end_seconds)
        every = self._config.checkpoint.every
        due = bool(every and self.state.total_steps % every == 0) or (self._stopper.due and not last)
        ends = reason != "none" or (last and self._saves_end)
        validated = self._publisher.step(saves=due or asked or ends, stops=reason != "none")
        return _Published(reason, validated, due, asked)

    def _after_publishing(self, published: _Published) -> Reason:
        """Saves if due, if asked for or if the step is the best one. At the end ``run`` saves."""
        section, state = self._config.checkpoint, self.state
        own = published.validated.get("validation/step") == state.step
        best = note_validation(section, state, published.validated) if own else False
        if best or published.due:
            self._save(asynchronous=section.asynchronous, waits=published.asked)
        elif published.asked and published.reason == "none":
            self._save()
        if published.reason == "none" and state.total_steps != self._total:
            self._export()
        return published.reason

    def _save(self, *, asynchronous: bool = False, waits: bool = True) -> None:
        """``waits``: for engines on ranks of their own too, unless it is asynchronous."""
        began = alone = time.monotonic()
        if not asynchronous:
            self._settle(wait=True)
            alone = time.monotonic()
        touch("save", self.state.total_steps)
        check_finite_weights({name: role.model for name, role in self._run.models.trained.items()}, self.state)
        self._store.save(self.state, functools.partial(self._write_models, asynchronous=asynchronous))
        self._saved = self.state.total_steps
        self._stopper.checkpointed()
        if asynchronous:
            return
        self._timer.saved(time.monotonic() - alone)
        if waits:  # how long a save takes where the run must stop
            self._finish_saves()
            self._stopper.saved(time.monotonic() - began)

    def _export(self) -> None:
        """Exports the step if its checkpoint exists and that is due. Not before a stop, which must not take long: then
        the resumed run does it."""
        if self._saved == self.state.total_steps:
            self._stopper.exported(self._exporter.export(self.state))

    def _finish_saves(self) -> None:
        """Waits until all of the last checkpoint is written, by the engines too."""
        if self._run.engines is not None:
            self._run.engines.wait_for_writing()
        self._settle(wait=True)

    def _settle(self, *, wait: bool) -> None:
        """Ends a background save that is written; with ``wait`` waits for it."""
        touch("end of a save", self.state.total_steps)
        self._store.settle(wait=wait)

    def _write_models(self, folder: Path, *, asynchronous: bool) -> list[BackgroundWrite]:
        run, shares = self._run, list[BackgroundWrite | None]()
        if run.judges is not None:  # they write beside this rank
            reference = "reference" in run.judges.models and self._reference_is_ours()
            shares.append(run.judges.save(folder, self.state, asynchronous=asynchronous, reference=reference))
        parts = {name: role.model for name, role in run.models.trained.items()}
        if run.reference is not None and self._reference_is_ours():
            parts["reference"] = run.reference
        for name, model in parts.items():
            on_first_rank(functools.partial(make_folder, folder / name))
            shares.append(model.save(folder / name, self.state.total_steps, asynchronous=asynchronous))
        for name in parts.keys() - {"actor"}:
            parts[name].offload()
        run.carryover.save(folder, run.context.info.rank)
        if run.engines is not None:
            shares.append(run.engines.share(self.state.step))
        return [share for share in shares if share is not None]

    def _reference_is_ours(self) -> bool:
        """After a warm-up the reference model exists only in the run's checkpoints."""
        here = self._run.reference is not None or self._is_judged("reference")
        return here and self._config.sft is not None and self.state.step > 0

    def _is_judged(self, model: str) -> bool:
        """True if judges have a model."""
        return self._run.judges is not None and model in self._run.judges.models

    def _restore(self) -> RunState:
        saved = self._store.latest()
        run, rl = self._run, self._run.rl
        digest = rl.chooser.prompts.digest if rl is not None else ""
        beginning = placement_of(self._config, run.context.info.job_size).beginning_ranks
        check_job_agreement(run.context.info, {"training prompts of digest": digest}, beginning)
        if saved is None:
            if run.judges is not None:
                run.judges.begin(RunState(), None, reference=False)
            return RunState(prompts_digest=digest, actor_steps=0, critic_steps=0)
        enter("loading the checkpoint")
        self.state = saved.state
        forget_lost_best(self._config.checkpoint, self.state, self._store)
        self._check_phases(saved.folder)
        self._check_prompts(digest)
        if run.judges is not None:
            run.judges.begin(self.state, saved.folder, reference=self._reference_is_ours())
        if saved.state.step and self._config.sft:
            run.actor.reset_optimizer(self._config.actor.optimizer)
        run.actor.load(saved.folder / "actor")
        if run.reference is not None and self._reference_is_ours():
            run.reference.load(saved.folder / "reference")
            run.reference.offload()
        if run.critic is not None:
            run.critic.load(saved.folder / "critic")
            run.critic.offload()
        if rl is not None:
            info, cursor = run.context.info, saved.state.prompt_cursor
            run.carryover.load(saved.folder, cursor, rl.chooser.prompt_at, info.rank, info.world_size)
            self._check_carryover()
        if run.engines is None:
            saved.state.validated_step = None
        self._saved, self._resumed = saved.state.total_steps, saved.folder
        return saved.state

    def _check_prompts(self, digest: str) -> None:
        """Refuses other training prompts than those that the cursor counts."""
        known = self.state.prompts_digest
        self.state.prompts_digest = digest or known
        if self.state.prompt_cursor and digest and known and known != digest:
            raise UserError(
                "the training prompts differ from those that the run began with: other files, another order of them, "
                "other mixture weights, limits or templates",
                where="data.train",
                remedy="put them back, or start a new run from the weights of this one",
            )

    def _check_carryover(self) -> None:
        """Refuses groups that a step of a colocated run has left to the next one: engines on ranks of their own would
        not train on them."""
        left = len(self._run.carryover.groups)
        if self._run.engines is not None and left:
            raise UserError(
                f"{left} groups of the checkpoint are left to the next step, which separate engines cannot take over",
                where="placement",
                remedy="set it back to colocated, or resume from a checkpoint without them",
            )

    def _check_phases(self, folder: Path) -> None:
        """Refuses a changed config that the checkpoint does not fit."""
        steps = self._config.sft.steps if self._config.sft else 0
        if self.state.step and self.state.sft_step != steps:
            raise UserError(
                f"{steps} supervised steps, but RL has begun after {self.state.sft_step} of them",
                where="sft.steps",
                remedy=f"set it back to {self.state.sft_step}, or start a new run",
            )
        if self._run.models.has_critic and not exists(folder / "critic"):
            raise UserError(
                f"{self._config.algorithm.name} has a critic, but the checkpoint has none",
                where="algorithm.name",
                remedy="set it back to what it was, or start a new run",
            )
        if self._reference_is_ours() and not exists(folder / "reference"):
            raise UserError(
                "there is a KL term now, but the checkpoint has no reference model",
                where="algorithm.kl.coefficient",
                remedy="set it back to 0, or start a new run",
            )
