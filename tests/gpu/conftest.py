"""Tests of this folder skip where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from rlhpc.backends.kernels import packed_attention


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(params=["flash-attn", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two kernels that a site may have."""
    if request.param == "flash-attn":
        pytest.importorskip("flash_attn")
    else:
        monkeypatch.setattr(packed_attention, "_flash_attention", lambda: None)
    return request.param
