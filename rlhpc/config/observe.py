"""Sections of a run's records: alerts, trackers, profiles, samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from rlhpc.config.section import ImportPath, NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from rlhpc.core.errors import UserError

AlertAction = Literal["warn", "save", "stop"]
NO_TRACKER = "no_tracker"  # type of the error where an entry has no known kind, or a kind and a function
_KINDS = {"mlflow": "MlflowSection", "wandb": "WandbSection"}
TrackerName = Annotated[str, Field(pattern=r"^\w[\w-]*$", max_length=64)]
_Range = Annotated[str, Field(pattern=r"^[0-9]{1,9}(-[0-9]{1,9}(:[1-9][0-9]{0,8})?)?$")]
EVERY_RANK = range(10**9)
TENSORBOARD = "tensorboard"  # the name of this tracker


class AlertRuleSection(Section):
    """Limit on the median of a metric's newest values; for as long it must be kept before the rule can fire again."""

    metric: str
    """Name of the metric in metrics.jsonl."""
    above: float | None = None
    """Limit that the median is above when the rule fires."""
    below: float | None = None
    """Limit that the median is below when the rule fires."""
    of: Literal["best", "first", "median"] | None = None
    """Value of the metric that the limit is a share of (docs/watch.md); default: none."""
    steps: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Minimum number of newest values."""
    minutes: Annotated[float, Field(ge=0, le=1440)] = 0.0
    """Minimum time of the newest values, in minutes."""
    action: AlertAction = "warn"
    """Action besides the warning: none, a checkpoint after the step, or a checkpoint and the end of the run."""
    name: str | None = None
    """Name of the built-in rule that this one replaces (docs/watch.md)."""


class AlertsSection(Section):
    builtin: bool | list[str] = True
    """Built-in rules and events of the job: all (true), none (false), or those of these names (docs/watch.md)."""
    rules: list[AlertRuleSection] = []
    """Rules of your own, also in place of built-in ones."""
    command: str | None = None
    """Shell command run for each alert, with variables RLHPC_ALERT_… and the alert as JSON on its standard input."""
    webhook: str | None = None
    """URL that each alert is sent to as JSON with POST; treated as a secret."""


class MlflowSection(Section):
    """A run of MLflow, in a database or on a tracking server."""

    kind: Literal["mlflow"]
    """Library that the tracker belongs to."""
    name: TrackerName = "mlflow"
    """Name of the tracker in messages and files."""
    uri: str | None = None
    """URI of a tracking server or a database; default: the SQLite file trackers/NAME.db in the run folder."""
    experiment: str = "rlhpc"
    """Name of the MLflow experiment, made if it does not exist."""


class WandbSection(Section):
    """A run of Weights & Biases."""

    kind: Literal["wandb"]
    """Library that the tracker belongs to."""
    name: TrackerName = "wandb"
    """Name of the tracker in messages and files."""
    mode: Literal["offline", "online"] = "offline"
    """Destination of the steps: files in the run folder for `wandb sync`, or the server as they come."""
    project: str = "rlhpc"
    """Name of the W&B project."""
    entity: str | None = None
    """User or team that owns the project; default: that of the API key."""
    group: str | None = None
    """W&B group of the run."""
    tags: list[str] = []
    """W&B tags of the run."""


class OwnTrackerSection(Section):
    """A tracker of your own."""

    function: ImportPath
    """Import path of a function called as function(run, **arguments), which returns a function log(steps)."""
    name: TrackerName = "own"
    """Name of the tracker in messages and files."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the function."""


def _kind(entry: Any) -> str | None:
    """Tag of the class of an entry; None without a known kind, or with kind and function."""
    if isinstance(entry, MlflowSection | WandbSection | OwnTrackerSection):
        return type(entry).__name__
    if not isinstance(entry, dict) or ("kind" in entry) == ("function" in entry):
        return None
    kind = entry.get("kind")
    return "OwnTrackerSection" if "function" in entry else _KINDS.get(kind) if isinstance(kind, str) else None


def wrong_kind(entry: Any) -> tuple[str, str]:
    """Fault of an entry of no class, and the remedy."""
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind is None or "function" in entry:
        return "needs either kind or function", f"write kind: {' or '.join(_KINDS)}, or function: package.module:name"
    remedy = "set observe.tensorboard" if kind == "tensorboard" else f"allowed: {' or '.join(_KINDS)}"
    return f"unknown kind {str(kind)[:40]!r}", remedy


# A tag is the name of its class, so that an error's location names the class (rlhpc/config/load.py).
TrackerEntry = Annotated[
    Annotated[MlflowSection, Tag("MlflowSection")]
    | Annotated[WandbSection, Tag("WandbSection")]
    | Annotated[OwnTrackerSection, Tag("OwnTrackerSection")],
    Discriminator(_kind, custom_error_type=NO_TRACKER, custom_error_message="needs either kind or function"),
]


class ProfileSection(Section):
    """Profiles of chosen steps; `rlhpc profile` asks a running job for those of coming ones. See docs/profiles.md."""

    steps: Annotated[list[PositiveInt | _Range], Field(max_length=1000)] = []
    """RL steps to profile, such as [10, 40-42]; in a run without RL, warm-up steps. Default: none."""
    ranks: Annotated[list[NonNegativeInt | _Range | Literal["all"]], Field(min_length=1, max_length=1000)] = [0]
    """Ranks to profile, such as [0, 8-15]; [0-95:8] for every eighth, or [all]."""
    tools: Annotated[list[Literal["torch", "memory", "nsys"]], Field(min_length=1)] = ["torch"]
    """Tools to profile with: torch (trace and table), memory (snapshots of GPU memory), nsys (Nsight Systems)."""

    @property
    def rank_ranges(self) -> list[range]:
        return parse_ranges(self.ranks, "profile.ranks")

    @property
    def step_ranges(self) -> list[range]:
        return parse_ranges(self.steps, "profile.steps")


def parse_ranges(items: Iterable[int | str], where: str) -> list[range]:
    """Ranges of items such as 3, "40-42", "0-95:8" and "all". Raises UserError."""
    found = []
    for item in items:
        first, _, rest = str(item).partition("-")
        last, _, stride = rest.partition(":")
        part = EVERY_RANK if item == "all" else range(int(first), int(last or first) + 1, int(stride or 1))
        if not part:
            raise UserError(f"invalid range {item}", where=where, remedy="give the smaller number first")
        found.append(part)
    return found


class TrainingSamplesSection(Section):
    """Samples of training steps, as Parquet files in the run folder."""

    every: NonNegativeInt = 10
    """Interval in RL steps at which a step's samples are kept, after the first step's; 0: never."""
    max_mib: PositiveInt = 256
    """Maximum size of these files together, in MiB: the oldest but the first are removed."""


class ObserveSection(Section):
    tensorboard: bool = True
    """Metrics for TensorBoard as well."""
    trackers: list[TrackerEntry] = []
    """Further trackers: MLflow, Weights & Biases, your own."""
    samples: NonNegativeInt = 8
    """Number of samples per validation written to samples.jsonl."""
    histogram_steps: NonNegativeInt = 1000
    """Maximum number of RL steps with histograms in histograms.jsonl, evenly spread over the run; 0: no histograms."""
    training_samples: TrainingSamplesSection | None = TrainingSamplesSection()
    """Samples of training steps, written to training_samples in the run folder; null: none."""
    straggler_minutes: NonNegativeFloat = 2.0
    """Minutes, and at least 5 steps, in which a rank must be slower than the others to be named as straggler."""
    alerts: AlertsSection = AlertsSection()

    def tracker_names(self) -> list[str]:
        """Names of all trackers, TensorBoard's first."""
        return [*([TENSORBOARD] if self.tensorboard else []), *(tracker.name for tracker in self.trackers)]
