"""Layer 1: what is known of each model family, from ``config.json`` alone. Torch-free."""

from rlhpc.models.registry import FAMILIES, read_model, shape_of
from rlhpc.models.shape import ModelShape, Rope

__all__ = ["FAMILIES", "ModelShape", "Rope", "read_model", "shape_of"]
