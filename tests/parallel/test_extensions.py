"""Transformer Engine, apex and flash-attention in the image, as NVIDIA's have them: Megatron takes none of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.ranks

PACKAGES = (
    "amp_C",
    "apex",
    "flash_attn",
    "flash_attn_3",
    "fused_weight_gradient_mlp_cuda",
    "transformer_engine",
    "transformer_engine_torch",
)
# Any module below it, any name in a module, each of which must not be used.
STUB = """
import importlib.abc, importlib.machinery, sys, types

__version__ = "2.9.0"

class Kind(type):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")

class Stub(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            return Stub(f"{self.__name__}.{name}")
        return Kind(name, (), {"__init__": self})
    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} was used")

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Stub(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.append(Finder())
sys.modules[__name__].__class__ = Stub
"""
# What these packages switch on in Megatron.
FLAG = re.compile(r"HAVE_(TE|FA3|APEX|FUSED|PERSIST|FLASH)\w*|_grad_accum_fusion_available")
# Set in any case: by adopt_optimizer, by fuse_weight_gradients, and in a module whose class we do not build.
ALWAYS = {
    "optimizer.distrib_optimizer.HAVE_APEX_OR_TE",
    "tensor_parallel.layers._grad_accum_fusion_available",
    "transformer.multi_latent_attention.HAVE_TE",
}


def test_training_is_the_same_with_nvidia_s_packages_in_the_image(tmp_path: Path) -> None:
    models = [make_model(tmp_path / kind, kind) for kind in ("qwen3", "dsv3")]
    for package in PACKAGES:
        (tmp_path / "image" / package).mkdir(parents=True)
        (tmp_path / "image" / package / "__init__.py").write_text(STUB)
    image = {"PYTHONPATH": str(tmp_path / "image")}
    ((plain, _, flags),) = run_ranks(_updates, 1, models)
    ((in_image, there, others),) = run_ranks(_updates, 1, models, environ=image, fresh=True)
    assert there == list(PACKAGES)
    assert flags == others == []
    assert in_image == plain


def _updates(models: list[Path]) -> tuple[list[Any], list[str], list[str]]:
    """Two updates of each model in bfloat16; the packages that can be imported; Megatron's flags that are set."""
    from importlib.util import find_spec

    from rlhpc.backends.megatron import optimizer  # before any of the packages below
    from tests.helpers.training import make_actor, optimizer_section, train

    found = [train(make_actor(model, optimizer_section(), dtype="bfloat16"), 2) for model in models]
    there = [name for name in PACKAGES if find_spec(name) is not None and __import__(name)]
    flags = [
        f"{name.removeprefix('megatron.core.')}.{flag}"
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core")
        for flag, value in vars(module).items()
        if FLAG.fullmatch(flag) and value is True
    ]
    assert (
        optimizer.clip_grad_by_total_norm_fp32.__globals__["multi_tensor_scale_impl"].__module__
        == "megatron.core.utils"
    )
    return found, there, [flag for flag in flags if flag not in ALWAYS]
