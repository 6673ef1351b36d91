"""The working run that every case changes: configuration, site file, models, data and a user's module."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.models import ModelShape, shape_of
from rlhpc.sharding.shards import model_tensors

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "torch_dtype": "bfloat16",
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "rope_scaling": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "rope_scaling": _YARN},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "rope_parameters": {"rope_theta": 1e6}},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "norm_topk_prob": True},
    "deepseek_v3": {**_EXPERTS, **_LATENT, "architectures": ["DeepseekV3ForCausalLM"], "rope_parameters": _YARN},
}
CONFIG: dict[str, Any] = {
    "name": "mutant",
    "seed": 1,
    "site": "site.yaml",
    "model": {"path": "model", "dtype": "bfloat16"},
    "resources": {"ranks_per_node": 2},
    "slurm": {
        "nodes": 1,
        "time": "01:00:00",
        "gpus_per_node": 2,
        "gpu_type": "h100",
        "environment": {"COLOUR": "blue"},
        "setup": ["true"],
        "sbatch_options": {"nice": 5},
    },
    "recovery": {"retries": 2},
    "data": {
        "train": [{"path": "train.jsonl", "weight": 1.0}, {"path": "train.parquet", "weight": 2.0}],
        "validation": [{"path": "validation.jsonl", "name": "held"}],
        "max_prompt_tokens": 64,
        "filter": "mine:keep",
        "chat_template": "template.jinja",
        "template_arguments": {"thinking": False},
    },
    "actor": {
        "parallel": {"tp": 2},
        "optimizer": {"learning_rate": 1e-6},
        "memory": {"recompute": "none", "offload": {"optimizer": True}},
    },
    "rewards": [
        {"function": "mine:score", "name": "mine", "arguments": {"scale": 2}},
        {"model": "reward", "name": "judge", "weight": 0.5},
    ],
    "reward_workers": {"per_engine": 2},
    "rollout": {"tp": 1, "samples_per_prompt": 4, "max_response_tokens": 64, "kv_cache_gib": 1.0},
    "algorithm": {"name": "grpo", "kl": {"coefficient": 0.001}},
    "sft": {"data": ["sft.jsonl"], "steps": 5, "sequences_per_step": 8},
    "train": {
        "steps": 10,
        "prompts_per_step": 8,
        "minibatches": 2,
        "dynamic_sampling": {"max_batches": 4, "metric": "mine"},
        "replay": {"capacity": 16},
    },
    "checkpoint": {"every": 5},
    "planning": {"gpu": "h100", "prompt_tokens": 20},
}
SITE: dict[str, Any] = {
    "gpus": {"h100": {"memory_gib": 79.6}},
    "efficiency": {"compute": 0.5},
    "disk": {"read_gbps": 20.0},
    "slurm": {"partition": "gpu", "modules": ["cuda"]},
}
_MODULE = '''"""A user's functions."""

from rlhpc.models import find_family

FAMILY = find_family("{family}")


def score(data_source, solution_str, ground_truth, extra_info, scale=1):
    return scale * float(solution_str == ground_truth)


def keep(row):
    return True


def make(folder="."):
    pass
'''
_ROW = {
    "prompt": [{"role": "user", "content": "word1"}],
    "data_source": "sums",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 0},
}


def config_of(data: dict[str, Any] = CONFIG) -> dict[str, Any]:
    """A copy of the configuration, or of the site file's content, to change."""
    return deepcopy(data)


def fields_of(family: str) -> dict[str, Any]:
    """The fields of a family's config.json."""
    return deepcopy({**_COMMON, **FAMILIES[family]})


class Inputs:
    """The inputs of all families, written once; a case gets a copy of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for family in FAMILIES:
            _write_model(folder / family, fields_of(family))
        classifier = {**fields_of("qwen2"), "architectures": ["Qwen2ForSequenceClassification"]}
        _write_model(folder / "reward", classifier, head="value")
        _write_files(folder / "files")

    def copy(self, target: Path, family: str) -> None:
        """Writes the working run with a model of the family to ``target``."""
        shutil.copytree(self._folder / "files", target)
        shutil.copytree(self._folder / family, target / "model")
        shutil.copytree(self._folder / "reward", target / "reward")
        (target / "mine.py").write_text(_MODULE.format(family=family))
        write_yaml(target / "config.yaml", CONFIG)


def write_yaml(file: Path, value: Any) -> None:
    """Writes YAML by PyYAML's own dumper."""
    import yaml

    file.write_text(yaml.dump(value, sort_keys=False), encoding="utf-8")


def safetensors_bytes(header: bytes, data: int) -> bytes:
    """A safetensors file of zeros with this header."""
    return len(header).to_bytes(8, "little") + header + bytes(data)


def tensors_header(shape: ModelShape) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file with every tensor of the model in float32, and the bytes of its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in model_tensors(shape):
        start, end = end, end + 4 * prod(tensor.shape)
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    return header, end


def _write_model(folder: Path, fields: dict[str, Any], head: str = "vocabulary") -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    named = [name.replace("SequenceClassification", "CausalLM") for name in fields["architectures"]]
    shape = shape_of({**fields, "architectures": named})
    header, size = tensors_header(shape if head == "vocabulary" else shape.with_value_head)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(json.dumps(header).encode(), size))
    vocab = {f"word{number}": number for number in range(20)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": vocab}, "added_tokens": [{"id": 20, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": "{{ messages }}"}))


def _write_files(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    lines = "".join(json.dumps({**_ROW, "extra_info": {"index": index}}) + "\n" for index in range(4))
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text(lines)
    parquet.write_table(pyarrow.Table.from_pylist([_ROW] * 4), folder / "train.parquet")
    (folder / "sft.jsonl").write_text(json.dumps({"prompt": "word1", "response": "word2"}) + "\n")
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    write_yaml(folder / "site.yaml", SITE)
