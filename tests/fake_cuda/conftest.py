"""What the tests with a stand-in for a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhpc.backends.kernels import packed_attention


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    """What is found installed is remembered for a process."""
    caches = (packed_attention._flash_attention, packed_attention._parameters)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
