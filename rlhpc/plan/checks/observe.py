"""Checks of a run's records: alerts, profiles, trackers."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from urllib.parse import urlsplit

from rlhpc.config.observe import EVERY_RANK, TENSORBOARD, OwnTrackerSection
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError
from rlhpc.observe.alerts.configured import rules_of


def check_alerts(config: RunConfig) -> None:
    """Refuses rules that are not valid, such as one on a metric that the run cannot have, and a URL that is none."""
    faults = Faults()
    with faults.collect():
        rules_of(config)
    with faults.collect():
        if config.observe.alerts.webhook is not None:
            _check_url(config.observe.alerts.webhook, "observe.alerts.webhook")
    faults.raise_all()


def _check_url(url: str, where: str) -> None:
    """Refuses what is no address of a web server. The URL is a secret and is not shown."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(character.isspace() or not character.isprintable() for character in url):
        raise UserError("not the URL of a web server", where=where, remedy="write http://… or https://…")


def check_profile(config: RunConfig) -> None:
    """Refuses steps that the run does not have, ranks that it cannot have, and GPU tools on nodes without GPUs."""
    section, steps, faults = config.profile, last_step(config), Faults()
    with faults.collect():
        for part in section.step_ranges:
            if part[-1] > steps:
                key = "train.steps" if config.train.steps else "sft.steps"
                raise UserError(
                    f"step {part[-1]} is after the last one, {key} {steps}",
                    where="profile.steps",
                    remedy=f"use steps up to {steps}",
                )
    with faults.collect():
        for part in section.rank_ranges:
            if part != EVERY_RANK and part[-1] >= config.world_size:
                raise UserError(
                    f"no rank {part[-1]}: the run has {config.world_size}",
                    where="profile.ranks",
                    remedy=f"use ranks up to {config.world_size - 1}, or [all]",
                )
    faults.raise_all()


def last_step(config: RunConfig) -> int:
    """The last step that can be profiled: of RL, or of the warm-up if there is no RL."""
    return config.train.steps or (config.sft.steps if config.sft else 0)


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
    """True if the ranks use this Python: not that of a conda environment or a container, nor a login node's, which has
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
