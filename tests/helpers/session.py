"""State of the test session for helpers: its options, and the markers of the running test."""

from __future__ import annotations

all_fresh = False  # --fresh-processes: no process is forked from one that has imported PyTorch and vLLM
markers: set[str] | None = None  # None: no test is running, as in scripts and in processes of a test


def need(*names: str) -> None:
    """Refuse to start a resource in a test without its marker, which `make check` would run."""
    missing = set(names) - markers if markers is not None else set()
    assert not missing, f"mark this test with {', '.join(f'pytest.mark.{name}' for name in sorted(missing))}"


def starts(*names: str) -> bool:
    """Whether the running test is marked with one of these resources."""
    return markers is not None and not markers.isdisjoint(names)
