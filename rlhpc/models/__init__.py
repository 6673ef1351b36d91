"""Model families: how each one's ``config.json`` and tensors map to Megatron. Torch-free.

A family is a file here and an entry of ``FAMILIES``, or a user's own value that ``model.family`` names.
"""

from rlhpc.models.config_reader import ConfigReader
from rlhpc.models.dense import attention_rows, dense_table, frame_table, mlp_rows
from rlhpc.models.experts import expert_rows
from rlhpc.models.latent import latent_rows
from rlhpc.models.registry import FAMILIES, find_family, read_model, shape_of, value_shape
from rlhpc.models.shape import Experts, LatentAttention, ModelShape, Rope, read_dense
from rlhpc.models.tables import Cut, Family, Row, Where

__all__ = [
    "FAMILIES",
    "ConfigReader",
    "Cut",
    "Experts",
    "Family",
    "LatentAttention",
    "ModelShape",
    "Rope",
    "Row",
    "Where",
    "attention_rows",
    "dense_table",
    "expert_rows",
    "find_family",
    "frame_table",
    "latent_rows",
    "mlp_rows",
    "read_dense",
    "read_model",
    "shape_of",
    "value_shape",
]
