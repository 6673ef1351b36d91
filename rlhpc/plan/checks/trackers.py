"""Checks of the trackers that a run's metrics go to."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec

from rlhpc.config.observe import TENSORBOARD
from rlhpc.config.schema import RunConfig
from rlhpc.config.trackers import OwnTrackerSection
from rlhpc.core.errors import Faults, UserError

# Modules of each extra, in the order in which they are missed.
MODULES = {TENSORBOARD: ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "wandb": ("wandb",)}


def check_trackers(config: RunConfig) -> None:
    """Refuses trackers with the name of another one, and those whose library is not installed where the ranks run."""
    faults, section = Faults(), config.observe
    with faults.collect():
        _check_names(section.tracker_names())
    if runs_here(config):
        with faults.collect():
            if section.tensorboard and (module := missing(TENSORBOARD)):
                raise _error(module, TENSORBOARD, "observe.tensorboard", ", or set it to false")
        for place, tracker in enumerate(section.trackers):
            with faults.collect():
                if not isinstance(tracker, OwnTrackerSection) and (module := missing(tracker.kind)):
                    raise _error(module, tracker.kind, f"observe.trackers.{place}")
    faults.raise_all()


def runs_here(config: RunConfig) -> bool:
    """Whether the ranks use this Python: not that of a conda environment or a container, nor a login node's, which has
    no torch."""
    return not config.slurm.other_python and find_spec("torch") is not None


def missing(extra: str) -> str | None:
    """The first module of an extra that is not installed."""
    return next((module for module in MODULES[extra] if find_spec(module) is None), None)


def _error(module: str, extra: str, where: str, otherwise: str = "") -> UserError:
    remedy = f"pip install 'rlhpc[{extra}]'{otherwise}"
    return UserError(f"{module} is not installed", where=where, remedy=remedy)


def _check_names(names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(
            f"duplicate name {twice[0]!r}", where="observe.trackers", remedy="give each tracker a name of its own"
        )
