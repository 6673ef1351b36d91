"""Newest metrics of a run as a text file for Prometheus, such as for the textfile collector of node_exporter."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.config.observe import ObserveSection
from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import number
from rlhpc.core.shown import ShownOnly
from rlhpc.core.storage import NONE

_PREFIX, _SUFFIX = "rlhpc_", ".prom"


def prometheus_text(run: str, record: Mapping[str, Any]) -> str:
    """The numbers of a line of metrics.jsonl in the Prometheus text format, one gauge each, without timestamps.

    Metrics whose names differ only in characters that Prometheus lacks share a gauge and have a label ``metric``.
    """
    gauges: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in record.items():
        if (found := number(value)) is not None:
            gauges[_gauge(name)][name] = found
    labels = {"run": run, "phase": str(record.get("phase", ""))}
    lines: list[str] = []
    for gauge, values in sorted(gauges.items()):
        meaning = _escaped(" and ".join(sorted(values)), quotes=False)
        lines += [f"# HELP {gauge} {meaning} of the newest step", f"# TYPE {gauge} gauge"]
        for name, value in sorted(values.items()):
            own = labels if len(values) == 1 else {**labels, "metric": name}
            joined = ",".join(f'{label}="{_escaped(text)}"' for label, text in own.items())
            lines.append(f"{gauge}{{{joined}}} {_value(value)}")
    return "".join(line + "\n" for line in lines)


def prometheus_path(section: ObserveSection, run: str, folder: RunFolder) -> Path | None:
    """Path of the file: in the run folder (true), the named .prom file, or one in the named folder; None: no file."""
    setting = section.prometheus
    if isinstance(setting, bool):
        return folder.prometheus if setting else None
    return (setting if setting.suffix == _SUFFIX else setting / f"rlhpc-{run}{_SUFFIX}").absolute()


class PrometheusFile:
    """Replaces the file after each step. A failure is reported once and ends nothing."""

    def __init__(self, section: ObserveSection, run: str, folder: RunFolder) -> None:
        self._run, self._path = run, prometheus_path(section, run, folder)
        self._guard = ShownOnly("the Prometheus file")

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes the numbers of a line of metrics.jsonl, if there is a file. Waits for no file system."""
        if self._path is not None:
            with self._guard:
                write_atomic(self._path, prometheus_text(self._run, record), NONE)


def _gauge(name: str) -> str:
    """Name of a metric for Prometheus: ``rlhpc_reward_mean`` of ``reward/mean``."""
    return _PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _escaped(text: str, *, quotes: bool = True) -> str:
    """The text in a label or, without ``quotes``, after HELP."""
    text = text.encode("utf-8", "backslashreplace").decode().replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
