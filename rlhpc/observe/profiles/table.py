"""Tables of a Chrome trace of torch.profiler: the top kernels, and communication against computation. Without torch."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlhpc.core.errors import UserError

Event = dict[str, Any]
Span = tuple[float, float]  # begin and end, in microseconds
Kind = Literal["communication", "computation", "copy"]

_PREFIX = "rlhpc:"
_ON_DEVICE = {"kernel": "computation", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:", "c10d::")
_COLLECTIVE_KERNELS = ("nccl", "nvshmem", "deep_ep")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class KernelTime:
    """Time of all calls of one kernel, or of one operator without the operators that it calls."""

    name: str
    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class CommunicationShare:
    """Communication and computation in a phase, or in the whole trace. ``exposed``: communication beside which nothing
    is computed."""

    name: str
    seconds: float
    communication: float
    computation: float
    exposed: float


@dataclass(frozen=True)
class TraceTable:
    """``device``: whether times are those of GPU kernels; ``shares``: of the whole trace, then of its phases."""

    device: Literal["gpu", "cpu"]
    rows: tuple[KernelTime, ...]
    shares: tuple[CommunicationShare, ...]

    def as_json(self) -> dict[str, Any]:
        """JSON value of `rlhpc profile --json`."""
        return asdict(self)


def read_trace(path: Path) -> list[Event]:
    """Events of a Chrome trace, compressed or not. Raises UserError for another file."""
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)
        events = document["traceEvents"] if isinstance(document, dict) else document
        return [event for event in events if isinstance(event, dict)]
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile, RecursionError) as error:
        raise UserError(
            f"no Chrome trace ({type(error).__name__})", where=str(path), remedy="give a .trace.json.gz, or a run"
        ) from None


def trace_table(events: Sequence[Event]) -> TraceTable:
    """Table of a trace. With GPU kernels their times count, else those of CPU operators."""
    timed = [event for event in events if event.get("ph") == "X" and _is_timed(event)]
    on_device = [event for event in timed if event.get("cat") in _ON_DEVICE]
    found = list(_kernels(on_device)) if on_device else list(_operators(timed))
    spans: dict[str, list[Span]] = {"communication": [], "computation": [], "copy": []}
    for _, kind, span, _ in found:
        spans[kind].append(span)
    moved, computed = union(spans["communication"]), union(spans["computation"])
    phases: dict[str, list[Span]] = {}
    for event in timed:
        name = str(event.get("name", ""))
        if name.startswith(_PREFIX) and "." not in name and event.get("cat") == "user_annotation":
            phases.setdefault(name.removeprefix(_PREFIX), []).append(_span(event))
    whole = [_span(event) for event in timed if event.get("cat") != "Trace"]
    bounds = [(min(begin for begin, _ in whole), max(end for _, end in whole))] if whole else []
    shares = [_share(name, union(parts), moved, computed) for name, parts in {"all": bounds, **phases}.items()]
    return TraceTable("gpu" if on_device else "cpu", tuple(_rows(found)), tuple(shares))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times as disjoint spans, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersection(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Times in both of two lists of disjoint spans in order."""
    found, ends = [], [end for _, end in right]
    for begin, end in left:
        for other in right[bisect_left(ends, begin) :]:
            if other[0] >= end:
                break
            found.append((max(begin, other[0]), min(end, other[1])))
    return found


def _share(name: str, inside: Sequence[Span], moved: Sequence[Span], computed: Sequence[Span]) -> CommunicationShare:
    communication = intersection(inside, moved)
    hidden = _seconds(intersection(communication, computed))
    total = _seconds(communication)
    return CommunicationShare(name, _seconds(inside), total, _seconds(intersection(inside, computed)), total - hidden)


_Found = tuple[str, str, Span, float]  # name, kind, when, microseconds of its own


def _kernels(events: Iterable[Event]) -> Iterator[_Found]:
    for event in events:
        name = str(event.get("name", ""))
        collective = any(part in name.lower() for part in _COLLECTIVE_KERNELS)
        kind = "communication" if collective else _ON_DEVICE[event["cat"]]
        yield name, kind, _span(event), event["dur"]


def _operators(events: Iterable[Event]) -> Iterator[_Found]:
    """Operators of each thread, with the time not spent in operators that they call. What a collective calls is part of
    it."""
    threads: dict[Any, list[Event]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" or _is_collective(event):
            threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for thread in threads.values():
        yield from _of_thread(sorted(thread, key=lambda event: (event["ts"], -event["dur"])))


def _of_thread(events: Iterable[Event]) -> Iterator[_Found]:
    open_ones: list[tuple[Event, list[float]]] = []  # with the time of operators inside

    def close(until: float) -> Iterator[_Found]:
        while open_ones and sum(_edge(open_ones[-1][0])) <= until:
            event, inner = open_ones.pop()
            kind = "communication" if _is_collective(event) else "computation"
            yield str(event.get("name", "")), kind, _span(event), max(0.0, event["dur"] - sum(inner))

    for event in events:
        yield from close(event["ts"])
        if open_ones and _is_collective(open_ones[-1][0]):
            continue
        if open_ones:
            open_ones[-1][1].append(event["dur"])
        open_ones.append((event, []))
    yield from close(float("inf"))


def _rows(found: Iterable[_Found]) -> list[KernelTime]:
    sums: dict[tuple[str, str], list[float]] = {}
    for name, kind, _, own in found:
        row = sums.setdefault((name, kind), [0, 0.0])
        row[0], row[1] = row[0] + 1, row[1] + own
    rows = [KernelTime(name, kind, int(calls), own / 1e6) for (name, kind), (calls, own) in sums.items()]
    return sorted(rows, key=lambda row: (-row.seconds, row.name))


def _is_collective(event: Event) -> bool:
    return str(event.get("name", "")).startswith(_COLLECTIVES)


def _is_timed(event: Event) -> bool:
    return isinstance(event.get("ts"), int | float) and isinstance(event.get("dur"), int | float)


def _edge(event: Event) -> Span:
    return event["ts"], event["dur"]


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _seconds(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans) / 1e6
