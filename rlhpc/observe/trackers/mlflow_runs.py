"""A run of MLflow, in a database or on a tracking server, through its client alone: nothing is logged by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlhpc.config.observe import MlflowSection
from rlhpc.core import env
from rlhpc.core.files import make_folder
from rlhpc.observe.trackers.protocol import PHASES, MetricsPoint, Outcome, Position, TrackedRun

_TAG = "rlhpc.run"
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000  # of a call; characters of a value
_OTHER = re.compile(r"[^\w\-. :/]")
_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Mlflow:
    """The MLflow run with the tag of our run.

    A call's metrics are in the database together or not at all. Each step has its own number as a metric, which shows
    where the run ends. A metric with equal time, step and value is stored once, so that a call may be repeated.
    """

    def __init__(self, run: TrackedRun, section: MlflowSection) -> None:
        os.environ.setdefault(env.MLFLOW_DISABLE_TELEMETRY, "true")
        from mlflow import MlflowClient

        files = run.folder.trackers
        uri = section.uri or f"sqlite:///{files.database(section.name)}"
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

    def newest(self) -> Position | None:
        """The newest step of the MLflow run."""
        metrics = self._client.get_run(self._id).data.metrics
        steps = ((place, metrics.get(f"{phase}/step")) for place, phase in enumerate(PHASES))
        return max(((place, int(step)) for place, step in steps if step is not None), default=None)

    def log(self, points: Sequence[MetricsPoint]) -> None:
        """Stores steps, as many in a call as MLflow allows."""
        from mlflow.entities import Metric

        for some in _calls(points):
            metrics = [
                Metric(name, value, round(point.time * 1000), point.place)
                for point in some
                for name, value in _values(point).items()
            ]
            for first in range(0, len(metrics), _MOST_METRICS):
                self._client.log_batch(self._id, metrics[first : first + _MOST_METRICS])

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


def name_of(metric: str) -> str:
    """MLflow's name of a metric: ``pass_at_1`` for ``pass@1``, and _ for any other character that it refuses."""
    return _OTHER.sub("_", metric.replace("@", "_at_"))


def _values(point: MetricsPoint) -> dict[str, float]:
    """Values by MLflow's names, the number of the step last."""
    return {**{name_of(name): value for name, value in point.metrics.items()}, f"{point.phase}/step": point.step}


def _calls(points: Sequence[MetricsPoint]) -> Iterator[list[MetricsPoint]]:
    """The points in groups that fit into a call; one that does not has a group of its own."""
    some: list[MetricsPoint] = []
    count = 0
    for point in points:
        size = len(point.metrics) + 1
        if some and count + size > _MOST_METRICS:
            yield some
            some, count = [], 0
        some, count = [*some, point], count + size
    if some:
        yield some
