"""Published figures of other frameworks' runs, and each publisher's count of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhpc.models import ModelShape
from rlhpc.models.flops import forward_terms, head_rows

ROOT = Path(__file__).parents[1]
READY, PUBLISHED = ROOT / "configs" / "ready", ROOT / "tools" / "published"
# Settings of verl's runs that differ from rlhpc's defaults: engines without CUDA graphs.
_EAGER = ("rollout.cuda_graphs=false",)
_SEQUENCES = "rollout.max_num_seqs=256"  # of each engine of a published run

# Share of these steps outside of models, which rlhpc does not predict: rewards, data between driver and workers, starts
# of phases. Fitted with `python -m tools.published_table --fit`.
OUTSIDE = 0.17

# Operations of a token's forward and backward pass, from the model and the mean number of tokens it attends to.
Operations = Callable[[ModelShape, float], float]

_VERL = "https://github.com/volcengine/verl/blob/main/docs/perf/dpsk.md"
_NEMO = "https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md"
_PRIME = "https://github.com/PrimeIntellect-ai/prime-rl/blob/main/benchmarks/results/BENCHMARKS.md"


def verl_operations(shape: ModelShape, pairs: float) -> float:
    """verl's count (verl/utils/flops_counter.py of August 2025): the embedding as a product, attention without its
    mask, and values as wide as keys."""
    embedding = 6.0 * head_rows(shape) * shape.hidden_size
    return 3 * forward_terms(shape)[0] + embedding + _unmasked(shape, shape.head_dim, pairs)


def prime_rl_operations(shape: ModelShape, pairs: float) -> float:
    """prime-rl's count (src/prime_rl/trainer/perf.py of January 2026): attention without its mask, in heads that
    divide the hidden size."""
    return 3 * forward_terms(shape)[0] + _unmasked(shape, shape.hidden_size // shape.num_heads, pairs)


def own_operations(shape: ModelShape, pairs: float) -> float:
    """rlhpc's count."""
    of_token, of_pair = forward_terms(shape)
    return 3 * (of_token + of_pair * pairs)


def _unmasked(shape: ModelShape, head_dim: int, pairs: float) -> float:
    return 12.0 * shape.num_layers * shape.num_heads * head_dim * (2 * pairs - 1)


@dataclass(frozen=True)
class Published:
    """Published figures: seconds of a step and of rollout and weight sync, MFU in the publisher's count of operations,
    and GB of a GPU and of CPU memory; None if not published. ``source``: page of a public repository that has them."""

    path: Path
    source: str | None
    step: float | None = None
    mfu: float | None = None
    gpu_gb: float | None = None
    cpu_memory_gb: float | None = None
    rollout: float | None = None
    operations: Operations = own_operations
    overrides: tuple[str, ...] = ()
    nodes: int | None = None  # of eight GPUs, if other than the file's

    @property
    def name(self) -> str:
        return self.path.stem if self.nodes is None else f"{self.path.stem.rpartition('-')[0]}-{8 * self.nodes}gpus"

    @property
    def settings(self) -> tuple[str, ...]:
        """Overrides of the file."""
        nodes = () if self.nodes is None else (f"slurm.nodes={self.nodes}",)
        return (_SEQUENCES, *self.overrides, *nodes)

    @property
    def link(self) -> str:
        """Markdown of the name, with its source."""
        return f"`{self.name}`" if self.source is None else f"[`{self.name}`]({self.source})"


FITTED = (
    Published(
        READY / "deepseek-v3-671b-96gpus.yaml", _VERL, 1700, 0.19, 66, 1500, 1050, verl_operations, overrides=_EAGER
    ),
    Published(READY / "qwen3-235b-32gpus.yaml", None, 600, 0.25, 48, 800, None, verl_operations, overrides=_EAGER),
    Published(READY / "qwen2-7b-8gpus.yaml", None, 120, 0.35, 24, None, None, verl_operations, overrides=_EAGER),
)
HELD_OUT = (
    Published(PUBLISHED / "qwen3-30b-nemo-32gpus.yaml", _NEMO, step=192),
    Published(PUBLISHED / "deepseek-v3-nemo-256gpus.yaml", _NEMO, step=134),
    Published(PUBLISHED / "qwen3-4b-prime-8gpus.yaml", _PRIME, mfu=0.361, operations=prime_rl_operations),
    Published(PUBLISHED / "qwen3-30b-verl-8gpus.yaml", _VERL, mfu=0.40, operations=verl_operations),
)
# First compared after all constants and factors had been fixed.
BLIND = (
    Published(PUBLISHED / "qwen3-235b-nemo-128gpus.yaml", _NEMO, step=395),
    Published(PUBLISHED / "qwen3-235b-nemo-128gpus.yaml", _NEMO, step=312, nodes=32),
    Published(PUBLISHED / "deepseek-v3-nemo-256gpus.yaml", _NEMO, step=111, nodes=64),
    Published(PUBLISHED / "qwen3-30b-verl-8gpus.yaml", _VERL, mfu=0.37, operations=verl_operations, nodes=2),
    Published(PUBLISHED / "qwen3-30b-verl-8gpus.yaml", _VERL, mfu=0.31, operations=verl_operations, nodes=4),
)
