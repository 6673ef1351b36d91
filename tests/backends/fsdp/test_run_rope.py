"""The base of dynamic RoPE that is fixed is compared with the one that config.json shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.core.errors import UserError
from rlhpc.models import describe_fields
from rlhpc.models import read_config as read_fields

pytestmark = pytest.mark.heavy  # imports transformers


def test_dimensions_that_transformers_rotates_by_default_are_refused(tmp_path: Path) -> None:
    """A quarter of a head in StableLM, which a file may leave out."""
    from transformers import AutoConfig

    from rlhpc.backends.fsdp.source import check_base, read_config

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    AutoConfig.for_model("stablelm", rope_parameters=dict(rope), architectures=["StableLmForCausalLM"]).save_pretrained(
        tmp_path
    )
    file = tmp_path / "config.json"
    for partial in ({"partial_rotary_factor": 0.25}, {}):
        fields = {name: value for name, value in json.loads(file.read_text()).items() if "partial" not in name}
        file.write_text(json.dumps({**fields, "rope_parameters": {**rope, **partial}}))
        config = read_config(tmp_path, tokens=9000, rope_tokens=9000)
        model = describe_fields({**read_fields(tmp_path, 9000), "num_key_value_heads": 32}, str(file))
        if partial:
            check_base(config, model)
            continue
        with pytest.raises(UserError, match=r"transformers rotates with base .*; add partial_rotary_factor") as caught:
            check_base(config, model)
        assert caught.value.where == "model.rope_tokens"
