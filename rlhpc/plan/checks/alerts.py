"""Checks of the rules of alerts."""

from __future__ import annotations

from urllib.parse import urlsplit

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError
from rlhpc.observe.alerts.configured import rules_of


def check_alerts(config: RunConfig) -> None:
    """Refuses rules on metrics that the run cannot have, conditions that cannot be read, and URLs that are none."""
    section, faults = config.observe.alerts, Faults()
    with faults.collect():
        rules_of(config)
    entries = [(f"rules.{number}.", entry.webhook) for number, entry in enumerate(section.rules)]
    for where, url in (("", section.webhook), *entries):
        if url is not None:
            with faults.collect():
                _check_url(url, f"observe.alerts.{where}webhook")
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
