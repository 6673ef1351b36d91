"""What the helpers know of the test session: its options, and the markers of the test that runs now."""

from __future__ import annotations

all_fresh = False  # --fresh-processes: no process is forked from one that has imported PyTorch and vLLM
markers: set[str] | None = None  # None: no test runs, as in scripts and in processes that a test started


def need(*names: str) -> None:
    """Refuse to start a resource in a test that is not marked with it: `make check` would start it too."""
    missing = set(names) - markers if markers is not None else set()
    assert not missing, f"mark this test with {', '.join(f'pytest.mark.{name}' for name in sorted(missing))}"
