"""Models: the description of any one, and families, whose ``config.json`` and tensors map to Megatron. Torch-free.

A family is a file here and an entry of ``FAMILIES``, or a user's own value that ``model.family`` names.
"""

from rlhpc.models.config_reader import ConfigReader, UnknownArchitecture, UnsupportedByFamily
from rlhpc.models.dense import attention_rows, dense_table, frame_table, mlp_rows
from rlhpc.models.describe import describe_fields
from rlhpc.models.description import ModelDescription, TensorHeader
from rlhpc.models.experts import expert_rows
from rlhpc.models.features import Experts, LatentAttention, Rope
from rlhpc.models.fixed_rope import has_dynamic_rope
from rlhpc.models.latent import latent_rows
from rlhpc.models.registry import FAMILIES, find_family, read_config, read_model, shape_of, value_shape
from rlhpc.models.shape import Defaults, ModelShape, read_dense
from rlhpc.models.tables import Cut, Family, Row, Where

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
