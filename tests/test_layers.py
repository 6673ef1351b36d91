"""The architecture, read from the imports: each package uses only layers below it, and torch stays out of the front."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Packages of one layer never import each other. The command line is on top of the launcher.
LAYERS = (
    {"core"},
    {"config", "models"},
    {"plan", "algo"},
    {"api"},
    {"parallel", "data", "observe", "rewards"},
    {"backends.megatron", "backends.fsdp2", "rollout", "reshard", "checkpoint"},
    {"trainer", "convert"},
    {"launch"},
    {"acceptance", "pieces"},
    {"cli"},
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
TORCH_FREE = {"core", "config", "models", "plan", "launch", "pieces", "cli"}
HEAVY = {"torch", "vllm", "transformers", "megatron"}
FILES = sorted((ROOT / "rlhpc").rglob("*.py"))


def package_of(module: str) -> str:
    """``rlhpc.core.env`` is of ``core``; back ends are packages of their own."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["backends"] else parts[:1])


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "rlhpc" else []
            yield from ((node.lineno, name) for name in names or [str(node.module)])


def breaches(module: str, text: str) -> list[str]:
    """What ``module`` imports and must not."""
    package, found = package_of(module), []
    for line, name in imports(ast.parse(text)):
        if package in TORCH_FREE and name.split(".")[0] in HEAVY:
            found.append(f"{module}:{line} imports {name}: {package} is torch-free")
        if name.split(".")[0] != "rlhpc":
            continue
        other = package_of(name)
        if other in LAYER_OF and other != package and LAYER_OF[other] >= LAYER_OF.get(package, 0):
            found.append(f"{module}:{line} imports {name}: layer {LAYER_OF[other]} from {LAYER_OF.get(package, 0)}")
    return found


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_imports_only_layers_below(file):
    assert not breaches(module_of(file), file.read_text(encoding="utf-8"))


def test_every_package_has_a_layer():
    packages = {package_of(module_of(file)) for file in FILES} - {"", "backends"}
    assert packages <= set(LAYER_OF)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("rlhpc.core.files", "from rlhpc.config import schema"),
        ("rlhpc.config.load", "from rlhpc import models"),
        ("rlhpc.plan.check", "def f():\n    import torch"),
        ("rlhpc.launch.local", "import torch.distributed as dist"),
        ("rlhpc.launch.local", "from rlhpc.cli.main import main"),
        ("rlhpc.backends.megatron.model", "from rlhpc.backends.fsdp2.model import build"),
    ],
)
def test_a_breach_is_seen(module, text):
    assert len(breaches(module, text)) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("rlhpc.algo.losses", "import torch"),
        ("rlhpc.cli.main", "from rlhpc.launch.run import run_here\nfrom rlhpc import __version__"),
        ("rlhpc.backends.megatron.model", "from rlhpc.backends.megatron.layers import x"),
    ],
)
def test_what_is_allowed_passes(module, text):
    assert not breaches(module, text)
