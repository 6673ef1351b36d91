"""How often the host waits for a GPU in a dense layer: never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case, actor
from tests.helpers.host_reads import host_reads
from tests.helpers.parts import chunks_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import batches_of, optimizer_section

pytestmark = pytest.mark.ranks

CASES = {"one rank": Case("qwen3"), "tp": Case("qwen3", tp=2), "cp": Case("qwen3", cp=2), "bias": Case("qwen2")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], float]]:
    """By case, of the first rank: reads by the host, and the greatest gradient of the input."""
    folder = tmp_path_factory.mktemp("dense")
    models = {kind: make_model(folder / kind, kind) for kind in ("qwen3", "qwen2")}
    return run_ranks(_passes, 2, models)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_host_never_waits_in_a_dense_layer(found: dict[str, tuple[list[str], float]], name: str) -> None:
    reads, gradient = found[name]
    assert gradient > 0
    assert not reads


def _passes(models: dict[str, Path]) -> dict[str, tuple[list[str], float]]:
    return {name: _pass(models[case.kind], case) for name, case in CASES.items()}


def _pass(folder: Path, case: Case) -> tuple[list[str], float]:
    """Of the second of two passes: the first one also makes what all layers share."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from rlhpc.backends.megatron.packed import local_batch
    from rlhpc.parallel.compat import megatron_device

    backend: Any = actor(folder, case, optimizer_section())
    (chunk,) = chunks_of(backend)
    layer: Any = next(module for module in chunk.modules() if isinstance(module, TransformerLayer))
    batch, *_ = batches_of(backend)
    (split,) = backend._splits([batch])
    local = local_batch(batch, split, parallel_state.get_context_parallel_rank(), backend._rope)
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(len(local.tokens) // case.tp, 1, layer.config.hidden_size, generator=generator)
    for _ in range(2):
        x = given.clone().requires_grad_()
        with megatron_device(), chunk.no_sync(), host_reads() as reads:
            output, _ = layer(x, packed_seq_params=local.params)
            torch.autograd.backward((output,), grad_tensors=(torch.ones_like(output),))
    return reads, float(x.grad.abs().max())
