"""Compares memory for weights, gradients and optimizer with the plan, to the byte.

``python -m tests.helpers.state_memory`` runs random layouts of every family on real ranks, and prints a table.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from rlhpc.backends.megatron import MegatronBackend, backend
from rlhpc.backends.megatron.adamw import MASTER
from rlhpc.backends.megatron.optimizer import device_tensors, inner_optimizers
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import ParallelSection
from rlhpc.core.errors import UserError
from rlhpc.core.rank import RankInfo
from rlhpc.models import read_model
from rlhpc.parallel.groups import build_groups
from rlhpc.plan.checks.parallelism import misfits
from rlhpc.plan.estimates.rank_memory import state_bytes
from rlhpc.sharding.layout import make_layout
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import leave_former
from tests.helpers.parts import bytes_by_storage, chunks_of
from tests.helpers.tiny_models import KINDS, make_model
from tests.helpers.training import optimizer_section

# Sizes that leave gaps: few are multiples of the buffers' alignment.
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 71, "hidden_size": 72, "intermediate_size": 136}


@dataclass(frozen=True)
class StateCase:
    """A model on a layout. ``critic``: with a value head. ``bucket``: elements per bucket."""

    kind: str
    axes: tuple[tuple[str, int], ...] = ()
    dtype: str = "bfloat16"
    optimizer_offload_fraction: float = 0.0
    trained: bool = True
    critic: bool = False
    bucket: int | None = None

    def __str__(self) -> str:
        axes = " ".join(f"{name}={size}" for name, size in self.axes)
        more = [name for name in ("trained", "critic") if getattr(self, name)]
        bucket = f"bucket={self.bucket}" if self.bucket else ""
        return " ".join(
            filter(None, [self.kind, axes, self.dtype, f"cpu={self.optimizer_offload_fraction}", *more, bucket])
        )


def compare(folders: dict[str, Path], cases: Sequence[StateCase]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """(measured, predicted) bytes of each case. Runs on every rank of a job."""
    return [_compare(folders[case.kind], case) for case in cases]


def _compare(folder: Path, case: StateCase) -> tuple[dict[str, int], dict[str, int]]:
    leave_former()
    section, info = ParallelSection(**dict(case.axes)), RankInfo.from_environ()
    layout, shape = make_layout(section, info.world_size), read_model(folder)
    shape = shape.with_value_head if case.critic else shape
    if not parallel_state.model_parallel_is_initialized():
        build_groups(layout, seed=1)
    optimizer = optimizer_section(optimizer_offload_fraction=case.optimizer_offload_fraction) if case.trained else None
    distribute = backend.distribute
    if case.bucket is not None:
        backend.distribute = functools.partial(distribute, bucket=case.bucket)
    try:
        model = MegatronBackend(shape, layout, info, case.dtype, ModelSettings(section, optimizer=optimizer))
        model.reset_optimizer()
    finally:
        backend.distribute = distribute
    predicted = state_bytes(
        shape,
        layout,
        info.rank,
        case.dtype,
        optimizer_offload_fraction=case.optimizer_offload_fraction if case.trained else None,
        bucket=case.bucket,
    )
    measured = measure(model)
    _drop(model)
    return measured, asdict(predicted)


def measure(model: Any) -> dict[str, int]:
    """Bytes of the rank's storages by the fields of ``StateBytes``."""
    masters, moments, on_cpu, staging = [], [], [], []
    for part in inner_optimizers(model.optimizer) if model.optimizer is not None else []:
        staging += [buffer for slot in part._slots for buffer in (slot._gradient, slot._weight)]
        for param, state in part.state.items():
            if param in part.on_cpu:
                on_cpu += state.values()
            else:
                masters += [value for name, value in state.items() if name == MASTER]
                moments += [value for name, value in state.items() if name != MASTER]
    kinds = {
        "parameters": device_tensors(model.models, None, "parameters"),
        "gradients": device_tensors(model.models, None, "gradients"),
        "master": masters,
        "moments": moments,
        "cpu": on_cpu,
        "staging": staging,
    }
    return {kind: sum(bytes_by_storage(tensors).values()) for kind, tensors in kinds.items()}


def _drop(model: Any) -> None:
    """Break references from hooks in autograd's nodes to the wrappers and their buffers."""
    for chunk in chunks_of(model):
        vars(chunk).clear()


def random_cases(count: int, world_size: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> list[StateCase]:
    """Random layouts of 4 layers for so many ranks, with the kinds of models in turn."""
    rng = random.Random(seed)
    cases: list[StateCase] = []
    with tempfile.TemporaryDirectory() as name:
        shapes = {kind: read_model(make_model(Path(name) / kind, kind, **SIZES)) for kind in kinds}
    while len(cases) < count:
        kind = kinds[len(cases) % len(kinds)]
        axes = {axis: rng.choice([1, 1, 2, 2, 4]) for axis in ("tp", "pp", "cp", "ep", "etp")}
        if shapes[kind].experts is None:
            axes |= {"ep": 1, "etp": 1}
        if axes["pp"] == 2:
            axes |= rng.choice([{}, {"vpp": 2}, {"first_stage_layers": 1, "last_stage_layers": 3}])
        section = ParallelSection(**axes)
        try:
            layout = make_layout(section, world_size)
        except UserError:
            continue
        if any(misfits(shapes[kind], layout, section)):
            continue
        case = StateCase(
            kind,
            tuple((axis, size) for axis, size in axes.items() if size > 1),
            dtype=rng.choice(["float32", "bfloat16", "bfloat16"]),
            optimizer_offload_fraction=rng.choice([0.0, 0.0, 0.4, 1.0]),
            trained=rng.random() > 0.1,
            critic=rng.random() < 0.2,
            bucket=rng.choice([None, None, 1, 20000]),
        )
        if case not in cases:
            cases.append(case)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4, 6, 8])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: make_model(Path(name) / kind, kind, **SIZES) for kind in KINDS}
        wrong = total = 0
        each = -(-options.count // len(options.worlds))
        for world_size in options.worlds:
            cases = random_cases(each, world_size, options.seed + world_size)
            ranks = run_ranks(compare, world_size, folders, cases, timeout=1800)
            for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
                different = [rank for rank, (measured, predicted) in enumerate(results) if measured != predicted]
                wrong, total = wrong + bool(different), total + 1
                text = f"WRONG on ranks {different}: {results[different[0]]}" if different else "equal"
                print(f"{world_size} ranks  {case!s:90} {sum(results[0][0].values()):>12,}  {text}", flush=True)
        print(f"{total - wrong} of {total} layouts equal to the byte")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    from tests.helpers import state_memory  # ranks import it by this name

    state_memory.main()
