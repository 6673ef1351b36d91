"""A model and its optimizer in Megatron's own torch_dist format: saved in one layout, loaded in any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from rlhpc.parallel.compat import megatron_device
from rlhpc.plan.layout import ParallelLayout


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds of one model: the modules of this rank's stages, and the optimizer of a trained one."""

    layout: ParallelLayout
    models: Sequence[GPTModel]
    optimizer: MegatronOptimizer | None

    def save(self, folder: Path) -> None:
        """Each rank writes its own shards into an existing empty folder. Collective."""
        with megatron_device(), torch.no_grad():
            metadata = _metadata()
            content = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
            dist_checkpointing.save(self._sharded(metadata, is_loading=False), str(folder), content_metadata=content)

    def load(self, folder: Path) -> None:
        """Take what was saved, in this layout or another. Collective."""
        with megatron_device(), torch.no_grad():
            state = dist_checkpointing.load(self._sharded(_metadata(), is_loading=True), str(folder))
            for i, model in enumerate(self.models):
                model.load_state_dict(state[f"model{i}"], strict=True)
            if self.optimizer is not None:
                self.optimizer.load_state_dict(state["optimizer"])

    def _sharded(self, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
        state = {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(self.models)}
        if self.optimizer is None:
            return state
        # Megatron looks the parameters up in "model" without virtual stages and in "model0", … with them.
        models = state if self.layout.vpp else {"model": state["model0"]}
        return {
            **state,
            "optimizer": self.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata),
        }


def _metadata() -> dict[str, Any]:
    """How Megatron is to lay its optimizer's state out: by parameters, not by this layout's buffers."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
