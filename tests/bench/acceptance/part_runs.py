"""Runs parts of acceptance in tests: in a rank's process, or with their own processes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from bench.acceptance.results import Context, Figure, Size, Skipped

Results = list[Figure | Skipped]


def collect(
    folder: Path, function: str, arguments: dict[str, Any], on_gpu: bool = False, size: Size = "tiny"
) -> Results:
    """Call module:function with a context and the arguments in this process; returns its results. For ``run_ranks``."""
    results: Results = []
    module, _, name = function.partition(":")
    context = Context(folder, size, on_gpu, results.append)
    getattr(importlib.import_module(module), name)(context, **arguments)
    return results


def figures(results: Results) -> dict[str, Figure]:
    """Figures by name; asserts that names are unique."""
    found = [result for result in results if isinstance(result, Figure)]
    assert len({figure.name for figure in found}) == len(found), [figure.name for figure in found]
    return {figure.name: figure for figure in found}


def missed(results: Results) -> list[str]:
    """Names of the figures that missed their goals."""
    return [name for name, figure in figures(results).items() if figure.met is False]


def with_goal(results: Results) -> list[str]:
    """Names of the figures that have goals."""
    return [name for name, figure in figures(results).items() if figure.goal is not None]


def skipped(results: Results) -> dict[str, str]:
    """Reasons of skipped cases by name."""
    return {result.name: result.reason for result in results if isinstance(result, Skipped)}


def correctness_with_a_wrong_weight(folder: Path, first: int) -> Results:
    """The dense case, where weight sync leaves a zeroed tensor in the engine from its ``first`` write on."""
    from rlhpc.reshard.manager import ReshardManager

    write, count = ReshardManager.write, 0

    def spoil(self: ReshardManager) -> None:
        nonlocal count
        write(self)
        count += 1
        if count >= first:
            self._parameters["model.layers.1.self_attn.o_proj.weight"].zero_()

    ReshardManager.write = spoil  # type: ignore[method-assign]
    return collect(folder, "bench.acceptance.weights:check", {"name": "dense"})
