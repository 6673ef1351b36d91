"""What cannot work is refused before anything starts, with key, value and remedy."""

from __future__ import annotations

import json

import pytest

from rlhpc.checkpoint.formats.model_folder import same_vocabulary
from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.models import read_model
from rlhpc.plan.checks.run import check_config
from rlhpc.sharding.shards import model_tensors
from tests.helpers.plain_model import write_inputs, write_safetensors


@pytest.fixture
def inputs(tmp_path):
    write_inputs(tmp_path)
    return tmp_path


def refused(folder, *overrides: str, prepared: bool = True) -> str:
    with pytest.raises(UserError) as caught:
        check_config(load_config(folder / "config.yaml", overrides), prepared=prepared)
    return str(caught.value)


def test_a_good_run_is_summarised(inputs):
    summary = dict(
        check_config(load_config(inputs / "config.yaml", ["resources.ranks_per_node=2", "actor.parallel.tp=2"]))
    )
    assert "training tp 2 x dp 1; rollout 2 engine(s) of tp 1" in summary["layout"]
    assert "rl 3 steps of 8 prompts x 4 samples" in summary["batch"]
    assert "Qwen2ForCausalLM, 2 layers" in summary["model"]
    assert "vocabulary 11 of 16" in summary["model"]
    assert "train.jsonl" in summary["data"]


def test_the_summary_names_every_axis(inputs):
    ranks, axes = "resources.ranks_per_node=8", "actor.parallel={tp: 2, pp: 2, cp: 2, first_stage_layers: 1, vpp: 1}"
    summary = dict(check_config(load_config(inputs / "config.yaml", [ranks, axes])))
    assert "training tp 2 x pp 2 (first stage of 1) x cp 2 x dp 1; rollout" in summary["layout"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["resources.ranks_per_node=3", "actor.parallel.tp=2"],
            "actor.parallel: tp 2 x cp 1 x pp 1 = 2 ranks does not divide the 3 ranks of the job "
            "(slurm.nodes x resources.ranks_per_node); nearest that fit: tp 1 x dp 3",
        ),
        (
            ["resources.ranks_per_node=4", "actor.parallel.pp=4"],
            "actor.parallel.pp: 2 layers do not divide into 4 pipeline stages; nearest that fit: tp 1 x pp 2 x dp 2",
        ),
        (
            ["resources.ranks_per_node=2", "actor.parallel.ep=2"],
            "actor.parallel.ep: 2 ranks are to share experts, which the model does not have; nearest that fit: tp 1"
            " x dp 2",
        ),
        (["resources.ranks_per_node=4", "rollout.tp=3"], "rollout.tp: engines of 3 ranks do not divide the 4 ranks"),
        (
            ["resources.ranks_per_node=3", "actor.parallel.tp=3"],
            "actor.parallel.tp: 3 does not divide the model's 4 attention",
        ),
        (["resources.ranks_per_node=3", "rollout.tp=3"], "rollout.tp: 3 does not divide the model's 4 attention"),
        (["actor.optimizer.arguments.momentum=1"], "actor.optimizer.arguments: momentum without a function to take"),
        (
            ["sft={data: [a], steps: 1}", "sft.optimizer.function=a:b", "sft.optimizer.optimizer_offload_fraction=0.5"],
            "sft.optimizer.optimizer_offload_fraction: 0.5 with a:b: only AdamW can update on the CPU; set",
        ),
        (
            ["actor.optimizer={name: muon, function: 'a:b'}", "train.backend=fsdp"],
            "actor.optimizer.name: muon beside your own optimizer a:b; leave it or actor.optimizer.function out",
        ),
        (
            ["actor.optimizer.momentum=0.9"],
            "actor.optimizer.momentum: 0.9 with adamw: it is Muon's; leave it out, or set actor.optimizer.name to muon",
        ),
        (
            ["actor.optimizer.name=muon"],
            "actor.optimizer.name: muon with train.backend megatron, whose optimizer cuts matrices anywhere over the"
            " data-parallel ranks; use adamw, or train.backend fsdp",
        ),
        (
            ["sft={data: [a], steps: 1}", "sft.optimizer.name=adamw8bit"],
            "sft.optimizer.name: adamw8bit with train.backend megatron, whose checkpoints contain moments in float32",
        ),
        (
            ["actor.memory.recompute=selective", "actor.memory.recompute_modules=[moe]"],
            "actor.memory.recompute_modules: the model has none of ['moe']; use core_attn, mlp or both, or set",
        ),
        (
            ["actor.memory.recompute=full", "actor.memory.recompute_layers=3"],
            "actor.memory.recompute_layers: groups of 3 layers do not divide stages of 2 layers; use one of [1, 2]",
        ),
        (
            ["actor.memory={recompute: selective, offload_activations: true}"],
            "actor.memory.offload_activations: true with recompute selective, but only inputs of recomputed layers are "
            "offloaded; set actor.memory.recompute to full, or leave it out",
        ),
        (
            ["actor.memory.recompute=selective", "actor.memory.recompute_modules=[]"],
            "actor.memory.recompute_modules: no modules to recompute; use core_attn, mlp or both, or set "
            "actor.memory.recompute to",
        ),
        (
            ["reshard.share_weights=true", "actor.memory.offload.parameters=true"],
            "reshard.share_weights: engines cannot share weights that are offloaded",
        ),
        (
            ["reshard.share_weights=true", "reshard.method=gather"],
            "reshard.share_weights: method gather copies whole tensors",
        ),
        (["actor.moe.router_replay=true"], "actor.moe.router_replay: the model has no experts; set it to fal"),
        (["train.minibatches=3"], "train.minibatches: 32 samples a step do not divide into 3 minibatches; use 2 or 4"),
        (
            ["resources.ranks_per_node=4", "train.minibatches=16"],
            "train.minibatches: minibatches of 2 samples cannot feed 4 data-parallel ranks; use 8",
        ),
        (
            ["resources.ranks_per_node=8", "train.prompts_per_step=1"],
            "train.prompts_per_step: 4 samples a step (train.prompts_per_step x rollout.samples_per_prompt) cannot "
            "feed 8 data-parallel ranks; use at least 2",
        ),
        (
            ["slurm.nodes=2", "resources.ranks_per_node=6", "rollout.tp=4"],
            "rollout.tp: engines of 4 ranks neither divide a node of 6 nor take whole nodes; use one of [1, 2, 3, 6",
        ),
        (
            ["slurm.nodes=[1, 2]", "resources.ranks_per_node=2", "train.minibatches=4", "train.prompts_per_step=2"],
            "train.minibatches: on 2 nodes: minibatches of 2 samples cannot feed 4 data-parallel ranks; use 2",
        ),
        (["slurm.nodes=[3, 2]"], "slurm.nodes: (3, 2): invalid range: minimum exceeds maximum; write [minimum, max"),
        (["train.steps=0"], "train.steps: 0 steps and no sft section"),
        (["data.train=[]"], "data.train: no prompt files"),
        (["sft={data: [x.jsonl], steps: 1, sequences_per_step: 1}", "resources.ranks_per_node=2"], "sft.sequences_per"),
        (["rollout.max_response_tokens=225"], "rollout.max_response_tokens: 225 response tokens after"),
        (["data.train.0=nowhere/train.jsonl"], "data.train.0: no such file 'nowhere/train.jsonl'"),
        (["data.validation.0=x.csv"], "data.validation.0: 'x.csv' is neither .jsonl nor .parquet"),
        (["model.path=nowhere"], "model.path: no such folder 'nowhere'"),
    ],
)
def test_what_does_not_fit_is_refused_with_key_and_remedy(inputs, overrides, message):
    assert refused(inputs, *overrides).startswith(message)


def test_a_weight_file_cut_short_names_file_and_missing_bytes(inputs):
    file = inputs / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert refused(inputs).startswith(f"{file}: is truncated, 100 bytes are missing")


def test_a_weight_file_cut_inside_its_header_is_refused(inputs):
    file = inputs / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    assert f"{file}: is truncated inside its header" in refused(inputs)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", (9).to_bytes(8, "little")])
def test_what_is_not_safetensors_is_refused(inputs, content):
    file = inputs / "model" / "model.safetensors"
    file.write_bytes(content)
    assert refused(inputs).startswith(f"{file}: is ")


def test_files_that_the_index_names_must_exist(inputs):
    folder = inputs / "model"
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    assert "lists 2 files, of which 1 are missing: model-2-of-2.safetensors" in refused(inputs)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/hostname", 7])
def test_files_outside_the_folder_are_refused(inputs, name):
    index = inputs / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert refused(inputs).startswith(f"{index}: 'a' is outside the model's folder, in {name!r}; ")


@pytest.mark.parametrize("offsets", [[-8, 0], [8, 4]])
def test_tensors_outside_their_file_are_refused(inputs, offsets):
    file = inputs / "model" / "model.safetensors"
    entries = {"a": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}
    text = json.dumps({**entries, "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert refused(inputs).startswith(f"{file}: is not a safetensors file; ")


def test_weights_of_another_model_are_refused(inputs):
    file = inputs / "model" / "model.safetensors"
    write_safetensors(file, {"model.embed_tokens.weight": (16, 32)})
    assert "'model.embed_tokens.weight' has shape [16, 32], config.json requires [16, 64]" in refused(inputs)
    write_safetensors(file, {"model.embed_tokens.weight": (16, 64)})
    assert "the weights have no tensor 'model.layers.0.self_attn.q_proj.weight'" in refused(inputs)


def test_weights_of_layers_that_predict_further_tokens_are_left_alone(tmp_path):
    """DeepSeek-V3 stores them as layers after the last one."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    attention = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    further = {"num_nextn_predict_layers": 1}
    fields = {"architectures": ["DeepseekV3ForCausalLM"], **experts, **attention, **further}
    config = load_config(write_inputs(tmp_path, **fields))
    model = tmp_path / "model"
    shapes = {tensor.name: tensor.shape for tensor in model_tensors(read_model(model))}
    write_safetensors(model / "model.safetensors", {**shapes, "model.layers.2.eh_proj.weight": (64, 128)})
    assert "DeepseekV3ForCausalLM, 2 layers" in dict(check_config(config))["model"]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(inputs):
    file = inputs / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append({"id": 16, "content": "<extra>"})
    file.write_text(json.dumps(tokenizer))
    assert refused(inputs).startswith(f"{file}: token ids go up to 16, but config.json has vocab_size 16")


def test_vocabularies_are_the_same_by_their_tokens(inputs, tmp_path):
    """The format of the file and its other contents do not matter."""
    tokenizer = json.loads((inputs / "model" / "tokenizer.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    assert not same_vocabulary(inputs / "model", other)
    extra = {"id": 16, "content": "<extra>"}
    for changes, same in (
        ({}, True),
        ({"truncation": {"max_length": 3}}, True),
        ({"added_tokens": [*tokenizer["added_tokens"], extra]}, False),
        ({"model": {**tokenizer["model"], "unk_token": "other"}}, False),
    ):
        (other / "tokenizer.json").write_text(json.dumps({**tokenizer, **changes}, indent=3))
        assert same_vocabulary(inputs / "model", other) is same, changes


def test_a_unigram_vocabulary_is_counted(inputs):
    file = inputs / "model" / "tokenizer.json"
    file.write_text(json.dumps({"model": {"type": "Unigram", "vocab": [[f"w{i}", 0.0] for i in range(17)]}}))
    assert "token ids go up to 16" in refused(inputs)


def test_a_missing_chat_template_is_refused_only_when_it_is_used(inputs):
    (inputs / "model" / "chat_template.jinja").unlink()
    assert refused(inputs).startswith("data.chat_template: the tokenizer")
    check_config(load_config(inputs / "config.yaml", ["data.chat_template=false"]))


@pytest.mark.parametrize(
    ("content", "message"), [("\n \n", "has no rows"), ("\nnot json\n", "train.jsonl:2: is not a JSON object")]
)
def test_bad_jsonl_is_refused(inputs, content, message):
    (inputs / "train.jsonl").write_text(content)
    assert message in refused(inputs)


def test_bad_parquet_is_refused(inputs):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = inputs / "train.parquet"
    override = f"data.train.0={file}"
    parquet.write_table(arrow.table({"prompt": ["a"]}), file)
    check_config(load_config(inputs / "config.yaml", [override]))
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert refused(inputs, override).startswith(f"{file}: is truncated")
    file.write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    assert refused(inputs, override).startswith(f"{file}: cannot be read as parquet")
    parquet.write_table(arrow.table({"prompt": arrow.array([], arrow.string())}), file)
    assert refused(inputs, override).startswith(f"{file}: has no rows")


def test_absent_inputs_pass_until_they_are_prepared(inputs):
    overrides = ["model.path=later/model", "data.train.0=later/train.jsonl"]
    config = load_config(inputs / "config.yaml", overrides)
    summary = check_config(config, prepared=False)
    assert sum("prepare makes it" in text for _, text in summary) == 2
    assert refused(inputs, *overrides).startswith("model.path: no such folder")
    assert refused(inputs, *overrides, "train.minibatches=3", prepared=False).startswith("train.minibatches")


def test_what_a_critic_cannot_be(inputs):
    assert "critic: grpo has no critic" in refused(inputs, "critic.warmup_steps=3")
    ppo = ("algorithm.name=ppo", "resources.ranks_per_node=2")
    said = refused(inputs, *ppo, "critic.parallel.tp=3")
    assert "the critic: " in said
    assert "critic.parallel" in said
    assert "critic.path: no config.json in" in refused(inputs, *ppo, "critic.path=/nowhere")
    other = inputs / "other"
    other.mkdir()
    config = json.loads((inputs / "model" / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 32}))
    assert "critic.path: a vocabulary of 32, the actor's has 16" in refused(inputs, *ppo, f"critic.path={other}")
    later = load_config(inputs / "config.yaml", [*ppo, "model.path=later", f"critic.path={inputs / 'model'}"])
    assert check_config(later, prepared=False), "nothing to compare a vocabulary with yet"
    assert "critic.optimizer.optimizer_offload_fraction" in refused(
        inputs, *ppo, "critic.optimizer={function: 'torch.optim:SGD', optimizer_offload_fraction: 0.5}"
    )


def test_the_summary_names_a_critics_own_layout(inputs):
    keys = ["algorithm.name=ppo", "resources.ranks_per_node=2", "critic.parallel.tp=2"]
    summary = dict(check_config(load_config(inputs / "config.yaml", keys)))
    assert "training tp 1 x dp 2; critic tp 2 x dp 1; rollout" in summary["layout"]


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("model.path", []),
        ("model.weights", []),
        ("critic.path", ["algorithm.name=ppo"]),
        ("rewards.0.model", []),
    ],
)
def test_a_model_among_the_run_s_own_checkpoints_is_refused(inputs, key, more):
    """Through a link: the run would remove it once there are newer checkpoints."""
    actor = inputs / "run" / "checkpoints" / "step-00000003" / "actor"
    actor.mkdir(parents=True)
    (inputs / "link").symlink_to(actor)
    line = refused(inputs, f"{key}={inputs / 'link'}", *more)
    assert line.startswith(f"{key}: ")
    assert "is among this run's checkpoints; only the newest 2 are kept; copy it" in line
