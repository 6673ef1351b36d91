"""Makes small wheels, and lists of packages like pip's."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.pieces.target import Target
from tools.pieces.wheels import LARGE, pack_rlhpc, write_wheel

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
THIS_MACHINE = f"manylinux_2_39_{platform.machine()}"


def wheel(
    folder: Path,
    name: str,
    version: str,
    requires: Iterable[str] = (),
    files: Mapping[str, str] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    """Write a wheel with these requirements; default content: one module with the package's name."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    described = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    content = {f"{name.replace('-', '_')}.py": ""} if files is None else dict(files)
    content |= {f"{stem}.dist-info/METADATA": metadata, f"{stem}.dist-info/WHEEL": described}
    return write_wheel(folder, f"{stem}-{tag}", [(file, text.encode()) for file, text in content.items()])


def installed_wheel(folder: Path, name: str) -> Path:
    """A pure Python package of this environment as a wheel."""
    found = distribution(name)
    files = [file for file in found.files or () if file.suffix != ".pyc" and ".." not in file.parts]
    content = [(str(file), file.read_binary()) for file in files if file.name != "RECORD"]
    return write_wheel(folder, f"{name}-{found.version}-py3-none-any", content)


def index_for_rlhpc(folder: Path) -> None:
    """Write a wheel per requirement of rlhpc[gpu], empty unless an installation imports it."""
    folder.mkdir()
    (scratch := folder.with_name("own")).mkdir()
    for line in pack_rlhpc(scratch).requires:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        extra = str(requirement.marker or "")
        if name not in ("rlhpc", "click", "vllm", "megatron-core") and (
            not extra or any(name in extra for name in ("train", "gpu", "tensorboard"))
        ):
            wheel(folder, name, _lowest(requirement))
    installed_wheel(folder, "click")
    wheel(folder, "torch", "2.11.0")
    wheel(folder, "torch", "2.13.0")
    wheel(folder, "later", "1.0")
    wheel(folder, "megatron-core", "0.16.1", ["torch>=2.6"], {"megatron/core/__init__.py": ""})
    llm = {
        "vllm/__init__.py": "",
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/llm.py": "import torch\n" + "#" * LARGE,
    }
    kernels = {"vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": "a" * 100, "vllm/vllm-rs": "b" * 50}
    kernels |= {"vllm/_qutlass_C.abi3.so": "c", "vllm/third_party/fmha_sm100/x.py": "d"}
    needs = ['later; python_version > "3.11"', "bulky-kernels==1.0"]
    wheel(folder, "vllm", "0.25.0", ["torch==2.11.0", *needs], llm | kernels)
    wheel(folder, "vllm", "0.32.0", ["torch==2.13.0", *needs], llm | kernels)
    wheel(folder, "bulky-kernels", "1.0", files={"bulky_kernels.py": "#" * 1000})


def _lowest(requirement: Requirement) -> str:
    versions = [each.version for each in requirement.specifier if each.operator in (">=", "==")]
    return versions[0] if versions else "1.0"


def pip_inspect(packages: Mapping[str, str], requires: Mapping[str, list[str]], python: str = "3.12") -> str:
    rows: list[dict[str, Any]] = [
        {"metadata": {"name": name, "version": version, "requires_dist": requires.get(name, [])}}
        for name, version in packages.items()
    ]
    return json.dumps({"version": "1", "installed": rows, "environment": {"python_version": python}})


def target(packages: Mapping[str, str], python: str = "3.12") -> Target:
    return Target(python, "manylinux_2_39_x86_64", packages)
