"""Layer 1: what is known of each model family, from ``config.json`` alone. Torch-free."""

from rlhpc.models.registry import FAMILIES, read_model, shape_of
from rlhpc.models.shape import Experts, LatentAttention, ModelShape, Rope

__all__ = ["FAMILIES", "Experts", "LatentAttention", "ModelShape", "Rope", "read_model", "shape_of"]
