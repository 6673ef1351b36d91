"""The list of trackers that a run's metrics go to, besides TensorBoard."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from rlhpc.config.section import ImportPath, Section

NO_TRACKER = "no_tracker"  # type of the error where an entry has no known kind, or a kind and a function
_KINDS = {"mlflow": "MlflowSection", "wandb": "WandbSection"}

TrackerName = Annotated[str, Field(pattern=r"^\w[\w-]*$", max_length=64)]


class MlflowSection(Section):
    """A run of MLflow, in a database or on a tracking server."""

    kind: Literal["mlflow"]
    """Library that the tracker belongs to."""
    name: TrackerName = "mlflow"
    """Name of the tracker in messages and for `rlhpc sync --tracker`."""
    uri: str | None = None
    """URI of a tracking server or a database; default: the SQLite file trackers/NAME.db in the run folder."""
    experiment: str = "rlhpc"
    """Name of the MLflow experiment, made if it does not exist."""


class WandbSection(Section):
    """A run of Weights & Biases."""

    kind: Literal["wandb"]
    """Library that the tracker belongs to."""
    name: TrackerName = "wandb"
    """Name of the tracker in messages and for `rlhpc sync --tracker`."""
    mode: Literal["offline", "online"] = "offline"
    """Destination of the steps: files in the run folder for `rlhpc sync`, or the server as they come."""
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
    """Import path of a function or class called as function(run, **arguments), which returns a tracker."""
    name: TrackerName = "own"
    """Name of the tracker in messages and for `rlhpc sync --tracker`."""
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
    """What is wrong with an entry of no class, and the remedy."""
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
