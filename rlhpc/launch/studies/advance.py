"""One advance of a study: reports the states of its trials to Optuna, and starts the next ones.

A trial is claimed in the journal, with its settings, before its run begins, and its number names the run's folder. One
that was interrupted in between is started by the next advance, with the same settings. An advance has the lock of the
folder.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.records import MetricsFile
from rlhpc.core.shown import show
from rlhpc.launch.studies.journal import FEASIBLE, INFEASIBLE, grid_size, open_study
from rlhpc.launch.studies.sides import curve, is_finished, objective_of
from rlhpc.launch.studies.space import configuration, suggest
from rlhpc.launch.studies.study_folder import StudyFolder, read_beginning, read_study
from rlhpc.launch.studies.trial_runs import LocalTrials, SlurmTrials, Trials, TrialState, rank_hours

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

CAUSE, RETRIES, HOURS = "cause", "retries", "hours"  # attributes of trials
_HOUR = 3600.0
# Causes that another start may not meet again.
_OF_THE_CLUSTER = (
    *("network", "stranger", "bad_node", "hang", "disk_full", "storage", "crash", "launch"),
    *("allocation_lost", "preempted", "requeued", "ended"),
)
_TOO_LARGE = ("gpu_memory", "cpu_memory")  # of the settings: the sampler learns that they cannot work
_MOST_INFEASIBLE = 100  # suggestions in a row


@dataclass
class Advance:
    """Advance of a study by the process that has the folder's lock. ``at_once``: trials at one time; 0: as in the
    study."""

    folder: StudyFolder
    trials: Trials
    at_once: int = 0

    def __post_init__(self) -> None:
        self.study = read_study(self.folder)
        self.optuna = open_study(self.folder, self.study)
        self.objective, self.began = self.study.objective, read_beginning(self.folder).time
        self.at_once = self.at_once or self.study.budget.at_once

    def run(self) -> int:
        """Settles trials and starts others up to the limits; returns the number of running ones."""
        running = self.settle()
        while not (limit := self.limit()) and running < self.at_once and self.start_next():
            running += 1
        return self.end_all(limit) if limit not in ("", "trials") else running

    def settle(self) -> int:
        """Reports the states of the claimed trials; returns the number of those that still run."""
        claimed = self._claimed()
        states = self.trials.states([self.folder.trial(trial.number) for trial in claimed])
        for trial, state in zip(claimed, states, strict=True):
            self._settle(trial, state)
        return len(self._claimed())

    def prune(self, number: int) -> bool:
        """Reports new values of a trial that runs, and prunes it if Optuna's pruner rejects one of them before its last
        step. True if the trial is pruned: its job must end."""
        trial = self.optuna.get_trials(deepcopy=False)[number]
        if trial.state.is_finished():
            return trial.state.name == "PRUNED"
        live, run = self._live(trial), self.folder.trial(number)
        if not self._report(trial, live, before=0 if is_finished(run) else load_config(run.config).train.steps):
            return False
        live.set_user_attr(HOURS, trial_hours(self.folder, trial))
        self._tell(number, None, "pruned")
        show(f"trial {number}: pruned")
        return True

    def limit(self) -> str:
        """Part of the budget that is used up; empty if nothing is."""
        budget = self.study.budget
        if budget.hours is not None and time.time() - self.began >= budget.hours * _HOUR:
            return "hours"
        counted = [trial for trial in self.optuna.get_trials(deepcopy=False) if counts(trial)]
        if budget.gpu_hours is not None:
            spent = sum(trial_hours(self.folder, trial) for trial in counted)
            if spent >= budget.gpu_hours:
                return "gpu_hours"
        return "trials" if len(counted) >= self.study.budget.trials or self._is_exhausted() else ""

    def start_next(self) -> bool:
        """Starts a trial whose settings can work; false if the sampler finds none."""
        for _ in range(_MOST_INFEASIBLE):
            trial = self.optuna.ask()
            if self._start(trial, again=False):
                return True
            if self._is_exhausted():
                return False
        reason = self.optuna.get_trials(deepcopy=False)[-1].user_attrs.get(INFEASIBLE, "")
        raise UserError(
            f"{_MOST_INFEASIBLE} settings in a row cannot work, the last because of: {reason}",
            where="space",
            remedy="narrow it, or change the base",
        )

    def end_all(self, limit: str) -> int:
        """Cancels running trials when the budget is used up."""
        for trial in self._claimed():
            self._cancel(trial)
            self._fail(trial, "budget", f"budget.{limit} is used up")
        return 0

    def _start(self, trial: Any, *, again: bool) -> bool:
        """Starts a claimed trial; false if its settings cannot work."""
        try:
            values = suggest(trial, self.study)
            config = configuration(self.folder, self.study, trial.number, values)
            self.trials.check(config)
        except UserError as error:
            self._check_base()
            trial.set_user_attr(INFEASIBLE, str(error))
            trial.set_constraint(FEASIBLE, 1.0)
            self._tell(trial.number, None, "pruned")
            show(f"trial {trial.number}: cannot work: {error}")
            return False
        show(f"trial {trial.number}: {_words(values)}")
        self.trials.start(config, again=again)
        return True

    def _check_base(self) -> None:
        """Raises UserError for an error of every configuration here, not of one trial's settings."""
        config: RunConfig = configuration(self.folder, self.study, 0, {})
        self.trials.check(config.model_copy(update={"run_dir": self.folder.path / "base"}))

    def _settle(self, trial: FrozenTrial, state: TrialState) -> None:
        live = self._live(trial)
        if state.phase == "new":
            self._start(live, again=False)
        elif state.phase == "finished":
            self._finish(trial, live)
        elif state.phase == "failed":
            self._failed(trial, live, state)

    def _cancel(self, trial: FrozenTrial) -> None:
        """Records the hours of a trial, whose last attempt may get no verdict, and cancels it."""
        hours = trial_hours(self.folder, trial)
        self._live(trial).set_user_attr(HOURS, hours)
        self.trials.cancel(self.folder.trial(trial.number))

    def _live(self, trial: FrozenTrial) -> Any:
        """The trial, to be changed."""
        import optuna

        return optuna.trial.Trial(self.optuna, trial._trial_id)

    def _finish(self, trial: FrozenTrial, live: Any) -> None:
        try:
            value = objective_of(self.folder.trial(trial.number), self.objective)
        except UserError as error:
            self._fail(trial, "metric", error.message)
            raise UserError(error.message, where="objective.metric", remedy=error.remedy) from None
        self._report(trial, live)
        live.set_constraint(FEASIBLE, -1.0)
        self._tell(trial.number, value, "complete")
        show(f"trial {trial.number}: {self.objective.metric} = {value:.5g}")

    def _failed(self, trial: FrozenTrial, live: Any, state: TrialState) -> None:
        retries = trial.user_attrs.get(RETRIES, 0)
        if state.cause in self.trials.resumed:
            self._start(live, again=True)
        elif state.cause in _OF_THE_CLUSTER and retries < self.study.retries:
            live.set_user_attr(RETRIES, retries + 1)
            show(f"trial {trial.number}: {state.cause}, it is submitted again")
            self._start(live, again=self.folder.trial(trial.number).holds_run())
        elif state.cause in _TOO_LARGE:
            live.set_user_attr(INFEASIBLE, state.message or state.cause)
            live.set_constraint(FEASIBLE, 1.0)
            live.set_user_attr(CAUSE, state.cause)
            self._tell(trial.number, None, "pruned")
            show(f"trial {trial.number}: {state.cause}")
        else:
            self._fail(trial, state.cause, state.message)

    def _fail(self, trial: FrozenTrial, cause: str, message: str) -> None:
        self._live(trial).set_user_attr(CAUSE, cause)
        self._tell(trial.number, None, "fail")
        show(f"trial {trial.number}: failed ({cause}): {message}")

    def _report(self, trial: FrozenTrial, live: Any, before: int = 0) -> bool:
        """Reports the objective at each new value of the metric. True if Optuna's pruner rejects one of those before a
        step; it is asked about the last known one too, after which an earlier process may have been killed."""
        values, known = [], trial.intermediate_values
        steps = MetricsFile(self.folder.trial(trial.number).metrics).steps()
        for step, value in curve(steps, self.objective.metric).items():
            values.append(value)
            if step not in known:
                live.report(self.objective.of(values), step)
            if step < before and (step not in known or step == trial.last_step) and live.should_prune():
                return True
        return False

    def _tell(self, number: int, value: float | None, state: str) -> None:
        from optuna.trial import TrialState as OptunaState

        try:
            self.optuna.tell(number, value, state=OptunaState[state.upper()], skip_if_finished=True)
        except RuntimeError:  # a grid's sampler ends the study at its last cell, which only ``optimize`` allows
            if not self._is_exhausted():
                raise

    def _is_exhausted(self) -> bool:
        ask = getattr(self.optuna.sampler, "is_exhausted", None)
        return bool(ask is not None and ask(self.optuna)) or self._is_grid_taken()

    def _is_grid_taken(self) -> bool:
        """True if each cell of a grid has a trial. Its sampler would repeat those that are not finished."""
        cells, trials = grid_size(self.study), self.optuna.get_trials(deepcopy=False)
        return cells is not None and len(trials) >= cells

    def _claimed(self) -> Sequence[FrozenTrial]:
        from optuna.trial import TrialState as OptunaState

        return self.optuna.get_trials(deepcopy=False, states=(OptunaState.RUNNING,))


def counts(trial: FrozenTrial) -> bool:
    """True if a trial has cost something: its settings were not refused before it began."""
    return INFEASIBLE not in trial.user_attrs or CAUSE in trial.user_attrs


def trial_hours(folder: StudyFolder, trial: FrozenTrial) -> float:
    """Hours of a trial's ranks: of one that was cancelled up to then, of one that runs up to now."""
    known = trial.user_attrs.get(HOURS)
    running = not trial.state.is_finished()
    return known if known is not None else rank_hours(folder.trial(trial.number), running=running)


def advance(folder: StudyFolder) -> int:
    """Advances a study in its working folder, which this process must be in; one that runs here to its end. Returns the
    number of running trials."""
    if not read_beginning(folder).local:
        with folder.locked():
            return Advance(folder, SlurmTrials(Path.cwd())).run()
    with folder.locked():
        while Advance(folder, LocalTrials(), at_once=1).run():
            pass
    return 0


def _words(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {show_value(value)}" for key, value in params.items())


def show_value(value: Any) -> str:
    """A value of a key, with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
