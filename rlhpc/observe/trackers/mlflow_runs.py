"""A run of MLflow, in a database or on a tracking server, through its client alone: nothing is logged by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.config.observe import MlflowSection
from rlhpc.core import env
from rlhpc.core.files import make_folder, remove
from rlhpc.core.records import PHASES, Position
from rlhpc.core.storage import exists
from rlhpc.observe.trackers.steps import Outcome, Step, TrackedRun, Tracker, later

_TAG = "rlhpc.run"
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000  # of a call; characters of a value
_OTHER = re.compile(r"[^\w\-. :/]")
_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Mlflow(Tracker):
    """The MLflow run with the tag of our run.

    A call's metrics are in the database together or not at all. Each step has its own number as a metric, which shows
    where the run ends. A metric with equal time, step and value is stored once, so that a call may be repeated.
    """

    def __init__(self, run: TrackedRun, section: MlflowSection) -> None:
        os.environ.setdefault(env.MLFLOW_DISABLE_TELEMETRY, "true")
        from mlflow import MlflowClient

        files = run.folder.trackers
        uri = section.uri or _database(files.database(section.name))
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = self._client.get_experiment_by_name(section.experiment)
        if experiment is None:
            artifacts = None
            if section.uri is None:
                make_folder(files.artifacts(section.name))
                artifacts = files.artifacts(section.name).as_uri()
            number = self._client.create_experiment(section.experiment, artifact_location=artifacts)
        else:
            number = experiment.experiment_id
        found = self._client.search_runs([number], filter_string=f"tags.`{_TAG}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            if found[0].info.status != "RUNNING":
                self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(number, run_name=run.name, tags={_TAG: run.id}).info.run_id
        metrics = self._client.get_run(self._id).data.metrics
        stored = ((place, metrics.get(f"{phase}/step")) for place, phase in enumerate(PHASES))
        self._newest = max(((place, int(step)) for place, step in stored if step is not None), default=None)

    def log(self, steps: Sequence[Step], again: Position | None) -> None:
        """Stores the steps that are new, as many in a call as MLflow allows."""
        new = later(steps, self._newest)
        at_once = max(1, _MOST_METRICS // max((len(step.metrics) + 1 for step in new), default=1))
        for start in range(0, len(new), at_once):
            some = new[start : start + at_once]
            metrics = [metric for step in some for metric in _metrics(step)]
            for first in range(0, len(metrics), _MOST_METRICS):
                self._client.log_batch(self._id, metrics[first : first + _MOST_METRICS])
            self._newest = some[-1].position

    def attach(self, settings: Mapping[str, str], files: Sequence[Path]) -> None:
        """Stores settings as params, which keep their first values, and files as artifacts."""
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        named = {_OTHER.sub("_", key)[:250]: value[:_LONGEST_PARAM] for key, value in settings.items()}
        new = [Param(key, value) for key, value in named.items() if key not in known]
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + _MOST_PARAMS])
        for file in files:
            self._client.log_artifact(self._id, str(file))

    def close(self, outcome: Outcome) -> None:
        """Sets the status; a run that may go on stays in RUNNING."""
        if outcome in _STATUS:
            self._client.set_terminated(self._id, _STATUS[outcome])


def _database(file: Path) -> str:
    """URI of a SQLite file with MLflow's tables. MLflow refuses one whose tables a killed process has begun."""
    from mlflow import MlflowClient

    if not exists(file):
        new = file.with_suffix(".new")
        remove(new)
        MlflowClient(*[f"sqlite:///{new}"] * 2).search_experiments()
        os.replace(new, file)
    return f"sqlite:///{file}"


def _metrics(step: Step) -> list[Any]:
    """Metrics of a step, its number last. MLflow refuses some characters: ``pass@1`` is ``pass_at_1`` there."""
    from mlflow.entities import Metric

    values = {_OTHER.sub("_", name.replace("@", "_at_")): value for name, value in step.metrics.items()}
    values[f"{step.phase}/step"] = step.step
    return [Metric(name, value, round(step.time * 1000), step.place) for name, value in values.items()]
