"""Loading a configuration: YAML 1.2 scalars, overrides, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.config import yaml12
from rlhpc.config.algorithm import DEFAULTS
from rlhpc.config.familiar import FAMILIAR, FIXED
from rlhpc.config.load import dump_config, json_schema, load_config
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.run import check_config

ROOT = Path(__file__).parents[2]
LEAST = "name: tiny\nmodel:\n  path: a/model\ntrain:\n  steps: 3\n"


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(LEAST)
    return file


def fault(file: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_least_configuration_takes_the_defaults(config):
    loaded = load_config(config)
    assert (loaded.name, loaded.model.path, loaded.train.steps) == ("tiny", Path("a/model"), 3)
    assert loaded.rollout.samples_per_prompt == 8
    assert loaded.folder == Path("runs/tiny")


def test_floats_without_a_dot_are_floats(config):
    config.write_text(LEAST + "actor:\n  optimizer: {learning_rate: 1e-6, weight_decay: 0}\n")
    optimizer = load_config(config).actor.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay) == (1e-6, 0.0)


def test_only_true_and_false_are_booleans(config):
    loaded = load_config(config, ["data.template_arguments={a: on, b: no, c: true, d: 010, e: 12:30, f: 2024-01-01}"])
    assert loaded.data.template_arguments == {"a": "on", "b": "no", "c": True, "d": 10, "e": "12:30", "f": "2024-01-01"}
    assert "observe.tensorboard: 'yes' is not allowed; allowed: true or false" in fault(
        config, "observe.tensorboard=yes"
    )


@pytest.mark.parametrize("name", [".", "..", "...", "a/b", "/tmp", "", "n" * 129, "a b"])
def test_a_name_that_is_a_path_is_refused(config, name):
    assert fault(config, f"name='{name}'").startswith("command line: name: ")
    assert load_config(config, ["name=.a..b-1"]).name == ".a..b-1"


def test_a_key_given_twice_is_refused_with_its_line(config):
    config.write_text(LEAST + "seed: 1\nname: other\n")
    assert fault(config) == f"{config}:7: key 'name' is given twice, first in line 1; correct the YAML"


def test_broken_yaml_names_file_and_line(config):
    config.write_text(LEAST + "data: [a\n")
    assert fault(config).startswith(f"{config}:7: ")


def test_an_unknown_key_names_line_key_and_the_nearest_valid_one(config):
    config.write_text(LEAST + "rollout:\n  tp: 1\n  cuda_graph: true\n")
    assert fault(config) == f"{config}:8: rollout.cuda_graph: unknown key; did you mean 'cuda_graphs'?"
    assert fault(config, "rollout={}", "trian.steps=1") == "command line: trian: unknown key; did you mean 'train'?"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dtype=float16", "model.dtype: 'float16' is not allowed; allowed: 'float32' or 'bfloat16'"),
        ("rollout.tp=0", "rollout.tp: 0 is not allowed; allowed: an integer at least 1"),
        ("rollout.tp=true", "rollout.tp: True is not allowed; allowed: an integer at least 1"),
        ("train.steps=1.5", "train.steps: 1.5 is not allowed; allowed: an integer at least 0"),
        ("rollout.top_p=1.5", "rollout.top_p: 1.5 is not allowed; allowed: a number above 0 and at most 1"),
        ("actor.optimizer.learning_rate=.inf", "allowed: a number above 0"),
        ("sft=3", "sft: 3 is not allowed; allowed: a section of 'key: value' lines"),
        ("data.train=a", "data.train: 'a' is not allowed; allowed: a list, each item a path"),
        ("data.train=[5]", "data.train.0: 5 is not allowed; allowed: a path or a section of 'key: value' lines"),
        ("data.train=[{path: a, wieght: 1}]", "data.train.0.wieght: unknown key; did you mean 'weight'?"),
        ("data.train=[{path: a, weight: 0}]", "data.train.0.weight: 0 is not allowed; allowed: a number above 0"),
        ("data.train=[{weight: 1}]", "data.train.0.path: is missing; add it"),
        ("data.chat_template=5", "data.chat_template: 5 is not allowed; allowed: true or false or a path"),
        (
            "reshard.verify=-1",
            "reshard.verify: -1 is not allowed; allowed: 'always' or 'never' or an integer at least 1",
        ),
        (
            "slurm.nodes=[0, 3]",
            "allowed: an integer at least 1 and at most 100000 or a list of an integer at least 1 and at most 100000, ",
        ),
        ("train.steps.x=1", "train.steps.x: train.steps = 3 has no keys inside"),
        ("data.train.1=a", "data.train.1: '1' is not an item of a list of 0; use a number from 0 to 0"),
        ("train.steps", "'train.steps' is not an override; write it as key.sub=value"),
        ("train..steps=1", "'train..steps=1' is not an override; write it as key.sub=value"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(config, override, message):
    assert message in fault(config, override)


def test_a_missing_key_is_named(config):
    config.write_text("name: tiny\nmodel:\n  path: a\ntrain:\n  prompts_per_step: 3\n")
    assert fault(config) == f"{config}:4: train.steps: is missing; add it"


@pytest.mark.heavy
def test_several_faults_are_one_line(config):
    message = fault(config, "rollout.tp=0", "seed=-1", "rollout.top_p=2", "rollout.top_k=1")
    assert message.count(" | ") == 3
    assert message.endswith("rollout.top_k: unknown key; write rollout.sampling.top_k")


def test_overrides_reach_sections_and_lists(config):
    loaded = load_config(
        config, ["train.steps=7", "data.train.0=x.jsonl", "data.train.1=y.jsonl", "sft.data.0=z.jsonl", "sft.steps=2"]
    )
    assert loaded.train.steps == 7
    assert [file.path for file in loaded.data.train] == [Path("x.jsonl"), Path("y.jsonl")]
    assert loaded.sft is not None
    assert (loaded.sft.data, loaded.sft.steps) == ([Path("z.jsonl")], 2)


def test_a_missing_file_names_the_nearest(config):
    assert fault(config.with_name("confg.yaml")).endswith(f"no such file; did you mean {str(config)!r}?")


def test_a_dumped_configuration_loads_as_the_same(config):
    overrides = [
        "data.train=[a.jsonl]",
        "data.validation=[{path: b.jsonl, name: hard}]",
        "data.chat_template=my.jinja",
        "rewards.0={function: m:f, arguments: {a: '1e-6', b: yes, c: 'true', d: '010', e: null}}",
        "rewards.1={model: a/judge, chat_template: false}",
        "algorithm.std_epsilon=1e-9",
    ]
    loaded = load_config(config, overrides)
    dumped = dump_config(loaded)
    assert "train:\n  - a.jsonl\n" in dumped
    config.write_text(dumped)
    assert load_config(config) == loaded


def test_the_committed_schema_is_current():
    committed = (ROOT / "configs" / "schema.json").read_text(encoding="utf-8")
    assert json.loads(committed) == json.loads(json_schema()), "run `rlhpc schema > configs/schema.json`"


def test_shipped_configurations_can_work_and_name_the_schema():
    files = [
        file
        for file in sorted((ROOT / "configs").rglob("*.yaml"))
        if file.parent.name != "ready" and file.name != "site.yaml"
    ]
    for file in files:
        check_config(load_config(file), prepared=False)
        up = "../" * (len(file.relative_to(ROOT / "configs").parts) - 1)
        assert file.read_text().startswith(f"# yaml-language-server: $schema={up}schema.json\n"), file


def test_every_algorithm_has_a_configuration():
    files = (ROOT / "configs" / "algorithms").glob("*.yaml")
    named = {file.stem: load_config(file).algorithm.name for file in files}
    assert named == {name: name for name in DEFAULTS}


def test_loading_imports_no_torch():
    code = "import sys, rlhpc.config.load, rlhpc.plan.checks.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_an_override_changes_an_item_of_a_default_list(config):
    (entry,) = load_config(config, ["rewards.0.name=x", "rewards.0.weight=2"]).rewards
    assert (entry.function, entry.name, entry.weight) == ("rlhpc.rewards.rules:maths", "x", 2.0)
    modules = load_config(config, ["actor.memory.recompute_modules.1=moe"]).actor.memory.recompute_modules
    assert modules == ["core_attn", "moe", "moe"]
    (entry,) = load_config(config, ["rewards.0.weight=3", "rewards.0.model=a/model"]).rewards
    assert (entry.model, entry.weight) == (Path("a/model"), 3.0)
    assert "needs either function or model" in fault(config, "rewards.0.function=a:b", "rewards.0.model=a/model")
    (entry,) = load_config(config, ["rewards.0={function: a:b}"]).rewards
    assert entry.function == "a:b"


@pytest.mark.heavy
@pytest.mark.parametrize("count", [30, 3000])
def test_hundreds_of_unknown_keys_are_reported_at_once(config, count):
    config.write_text(LEAST + "actor_rollout:\n" + "".join(f"  lr_{number}: 1\n" for number in range(count)))
    config.write_text(config.read_text() + "".join(f"some_key_{number}: 1\n" for number in range(count)))
    fault(config)  # builds the schema
    began = time.process_time()
    assert "and " in fault(config)
    assert time.process_time() - began < 4  # a second at most, on a quiet machine


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.prompts_per_step=1000000000000000000", "train.prompts_per_step: 1000000000000000000 is not allowed"),
        ("slurm.nodes=1000000", "slurm.nodes: 1000000 is not allowed"),
        ("resources.ranks_per_node=100000", "resources.ranks_per_node: 100000 is not allowed"),
        ("recovery.hang_timeout_seconds=1e300", "recovery.hang_timeout_seconds: 1e+300 is not allowed"),
        (".".join("a" * 2000) + "=1", "is not an override"),
    ],
)
def test_numbers_beyond_any_use_are_refused(config, override, message):
    assert message in fault(config, override)


_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)
_MERGES = "m0: &m0 {a: 1}\n" + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 30))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a: &a [*a]\n", "file:1: an alias stands for the value that it is in"),
        ("a: &a {b: {c: *a}}\n", "file:1: an alias stands for the value that it is in"),
        (_BOMB, "aliases stand for more than 20,000 values"),
        (_MERGES, "aliases stand for more than 20,000 values"),
        ("a:\n" + "- x\n" * 30_000, "more than 20,000 values"),
        ("[" * 500 + "]" * 500, "file:1: nested more than 64 deep"),
        ("[" * 50_000, "file:1: nested more than 64 deep"),
        ("".join(" " * depth + "a:\n" for depth in range(300)), "file:64: nested more than 64 deep"),
        ("a: " + "9" * 5000, "file:1: a number of 5,000 digits"),
        ("a: 0x" + "f" * 5000, "file:1: a number of 5,000 digits"),
        ("a: !!int b\n", "file:1: 'b' does not fit its tag !!int"),
        ("a: !!bool x\n", "file:1: 'x' does not fit its tag !!bool"),
        ("a: !!float [1]\n", "file:1: "),
        ("a: !!timestamp 2024-01-01\n", "file:1: the tag !!timestamp is not supported"),
        ("a: !!binary aGVsbG8=\n", "file:1: the tag !!binary is not supported"),
        ("a: !!set {b, c}\n", "file:1: the tag !!set is not supported"),
        ("a: !!python/object/apply:os.system ['true']\n", "file:1: the tag !!python/object/apply:os.system is not"),
        ("a: !mine 1\n", "file:1: the tag !mine is not supported"),
        ('a: "b\\0c"\n', "file:1: a text with the character '\\x00'"),
        ('a: "\\ud800"\n', "file:1: a text with the character '\\ud800'"),
        ('"a\\0": 1\n', "file:1: a text with the character '\\x00'"),
        ("a: " + "x" * 2**20, "file: is larger than 1 MiB"),
    ],
)
def test_documents_that_no_configuration_needs_are_refused(text, wrong):
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        yaml12.read(text, "file")
    assert wrong in str(caught.value)
    assert len(str(caught.value)) < 300
    assert time.process_time() - began < 10


def test_what_configurations_use_is_read():
    text = "a: &a {b: [1, 0x1F, 0o17, -2.5, 1e3, .inf]}\nc: {<<: *a, d: !!str 5}\ne: *a\nf: !!float 1\n"
    document = yaml12.read(text, "file")
    inner = {"b": [1, 31, 15, -2.5, 1000.0, float("inf")]}
    assert document.value == {"a": inner, "c": {**inner, "d": "5"}, "e": inner, "f": 1.0}
    assert (document.lines["c.d"], document.lines["a.b.4"]) == (2, 1)
    assert yaml12.read("", "file").value is None


DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


def error_line(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(DEMO, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "ours"),
    {
        "learning_rate": "actor.optimizer.learning_rate",
        "train.lr": "actor.optimizer.learning_rate",
        "actor_rollout_ref.actor.optim.lr": "actor.optimizer.learning_rate",
        "critic.optim.lr": "critic.optimizer.learning_rate",
        "sft.lr": "sft.optimizer.learning_rate",
        "num_generations": "rollout.samples_per_prompt",
        "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
        "rollout.n": "rollout.samples_per_prompt",
        "per_device_train_batch_size": "train.tokens_per_microbatch",
        "policy.megatron_cfg.tensor_model_parallel_size": "actor.parallel.tp",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tp",
    }.items(),
)
def test_a_familiar_key_names_ours(key: str, ours: str) -> None:
    assert f"command line: {key}: unknown key; write {ours}" in error_line(f"{key}=1").split(" | ")


@pytest.mark.parametrize("ours", dict.fromkeys(FAMILIAR.values()))
def test_the_key_that_is_named_exists(ours: str) -> None:
    assert f"{ours}: unknown key" not in error_line(f"{ours}=[[]]")


@pytest.mark.parametrize("key", FIXED)
def test_a_former_key_says_what_holds_now(key: str) -> None:
    around = ["rollout.speculative={}"] if key.startswith("rollout.speculative.") else []
    override = f"{key}=1"
    if key.startswith("observe.alerts.rules."):
        name = key.rpartition(".")[2]
        override, key = f"observe.alerts.rules=[{{metric: kl, {name}: 1}}]", f"observe.alerts.rules.0.{name}"
    place = f"command line: {key}: no longer a key: "
    assert error_line(*around, override) == f"{place}{FIXED[key.replace('.0.', '.')]}; leave it out"


def test_a_pasted_section_names_all_of_its_keys_at_once() -> None:
    pasted = "actor_rollout_ref={actor: {optim: {lr: 1, betas: 2}, clip_ratio_low: 1}, rollout: {n: 8, top_p: 1}}"
    faults = error_line(pasted).split(" | ")
    assert faults[:4] == [
        "command line: actor_rollout_ref.actor.optim.lr: unknown key; write actor.optimizer.learning_rate",
        "command line: actor_rollout_ref.actor.clip_ratio_low: unknown key; write algorithm.clip_low",
        "command line: actor_rollout_ref.rollout.n: unknown key; write rollout.samples_per_prompt",
        "command line: actor_rollout_ref.rollout.top_p: unknown key; write rollout.top_p",
    ]


def test_up_to_twenty_faults_are_shown_and_those_of_our_own_keys_first() -> None:
    faults = error_line(*(f"zz{number}=1" for number in range(25)), "train.steps=-1").split(" | ")
    assert len(faults) == 21
    assert faults[0].startswith("command line: train.steps: -1 is not allowed")
    assert faults[-1] == "and 6 more"
