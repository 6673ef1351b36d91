"""Tables of traces: the time of each operator or kernel, and communication against computation."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from rlhpc.observe.profiles.table import CommunicationShare, intersection, read_trace, trace_table, union


def event(name: str, begin: float, duration: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": begin, "dur": duration}


CPU = [
    event("PyTorch Profiler (0)", 0, 1e9, "Trace"),
    event("rlhpc:update", 100, 900, "user_annotation"),
    event("rlhpc:actor.layers.0", 100, 300, "user_annotation"),
    event("aten::linear", 100, 300),
    event("aten::mm", 150, 200),
    event("aten::mm", 400, 100),
    event("gloo:all_reduce", 450, 250, "user_annotation", tid=2),
    event("aten::copy_", 500, 100, tid=2),  # of the all-reduce
    event("rlhpc:rollout", 1000, 100, "user_annotation"),
    {"ph": "M", "name": "process_name"},
]


def test_operators_count_without_what_they_call() -> None:
    found = trace_table(CPU)
    rows = {row.name: (row.kind, row.calls, round(row.seconds * 1e6)) for row in found.rows}
    assert found.device == "cpu"
    assert rows == {
        "aten::linear": ("computation", 1, 100),
        "aten::mm": ("computation", 2, 300),
        "gloo:all_reduce": ("communication", 1, 250),
    }
    assert found.rows[0].name == "aten::mm"


def test_exposed_communication_is_that_beside_which_nothing_is_computed() -> None:
    whole, update, rollout = trace_table(CPU).shares
    assert whole == CommunicationShare("all", *(pytest.approx(number * 1e-6) for number in (1000, 250, 400, 200)))
    assert update == CommunicationShare("update", *(pytest.approx(number * 1e-6) for number in (900, 250, 400, 200)))
    assert rollout == CommunicationShare("rollout", pytest.approx(1e-4), 0, 0, 0)


def test_with_kernels_only_the_device_counts() -> None:
    kernels = [
        event("ampere_bf16_gemm", 200, 100, "kernel", 7),
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 250, 100, "kernel", 8),
        event("Memcpy HtoD", 400, 50, "gpu_memcpy", 7),
    ]
    found = trace_table([*CPU, *kernels])
    assert found.device == "gpu"
    assert [(row.name[:4], row.kind) for row in found.rows] == [
        ("ampe", "computation"),
        ("nccl", "communication"),
        ("Memc", "copy"),
    ]
    assert found.shares[0].exposed == pytest.approx(50e-6)


def test_unions_and_intersections_equal_those_of_sets() -> None:
    source = random.Random(3)

    def spans() -> list[tuple[int, int]]:
        begins = [source.randrange(60) for _ in range(source.randrange(9))]
        return [(begin, begin + source.randrange(1, 9)) for begin in begins]

    def points(parts: list[Any]) -> set[int]:
        return {point for begin, end in parts for point in range(int(begin), int(end))}

    for _ in range(300):
        left, right = spans(), spans()
        assert points(union(left)) == points(left)
        assert points(intersection(union(left), union(right))) == points(left) & points(right)


def test_a_trace_may_be_compressed_and_anything_else_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": CPU}).encode()
    for name, data in (("plain.json", text), ("packed.json.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(data)
        assert read_trace(tmp_path / name) == CPU
    for data in (b"", b"[1, 2", b"{}", b"\x1f\x8bx", gzip.compress(text)[:-20], b'{"traceEvents": 3}'):
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(UserError, match=r"no Chrome trace .*; give a"):
            read_trace(tmp_path / "bad")


def test_an_empty_trace_has_an_empty_table() -> None:
    assert trace_table([]).rows == ()
    assert trace_table([event("x", 0, float("nan"))] * 2).device == "cpu"
