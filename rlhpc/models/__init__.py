"""Models: the description of any one, and families, whose ``config.json`` and tensors map to Megatron. Torch-free.

A family is a file here and an entry of ``FAMILIES``, or a user's own value that ``model.family`` names.
"""

from rlhpc.models.config_reader import ConfigReader, UnknownArchitecture, UnsupportedByFamily
from rlhpc.models.describe import describe_fields
from rlhpc.models.description import Experts, LatentAttention, ModelDescription, Rope, TensorHeader
from rlhpc.models.registry import FAMILIES, find_family, read_config, read_model, shape_of, value_shape
from rlhpc.models.rope import has_dynamic_rope
from rlhpc.models.shape import Defaults, ModelShape, read_dense
from rlhpc.models.tables import (
    Cut,
    Family,
    Row,
    Where,
    attention_rows,
    dense_table,
    expert_rows,
    frame_table,
    latent_rows,
    mlp_rows,
)

__all__ = [
    "FAMILIES",
    "ConfigReader",
    "Cut",
    "Defaults",
    "Experts",
    "Family",
    "LatentAttention",
    "ModelDescription",
    "ModelShape",
    "Rope",
    "Row",
    "TensorHeader",
    "UnknownArchitecture",
    "UnsupportedByFamily",
    "Where",
    "attention_rows",
    "dense_table",
    "describe_fields",
    "expert_rows",
    "find_family",
    "frame_table",
    "has_dynamic_rope",
    "latent_rows",
    "mlp_rows",
    "read_config",
    "read_dense",
    "read_model",
    "shape_of",
    "value_shape",
]
