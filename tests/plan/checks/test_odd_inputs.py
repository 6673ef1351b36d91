"""Model folders, data files and modules as copies, disks and editors leave them: each is refused in one line."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint.formats.model_folder import count_rows
from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.imports import import_attribute
from rlhpc.data.files import read_rows
from rlhpc.models import shape_of
from rlhpc.plan.checks.run import check_config
from rlhpc.plan.checks.user_code import check_own_code
from tests.helpers.plain_model import write_inputs
from tools.mutants.inputs import fields_of

NOBODY = 65534
NO_FILE = "is not a safetensors file"
DEEP = b"[" * 50_000 + b"]" * 50_000


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    return tmp_path


def refused(inputs: Path, *overrides: str) -> str:
    """The line with which the check refuses the inputs."""
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        check_config(load_config(inputs / "config.yaml", overrides))
    assert time.process_time() - began < 5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": 5}, "architectures = 5 is not a list of names"),
        ({"architectures": [5]}, "architectures = [5] is not a list of names"),
        ({"hidden_size": 2}, "hidden_size 2 is below num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 does not divide into num_key_value_heads 3"),
        ({"vocab_size": 10**400}, "vocab_size = an integer of 1329 bits is not a valid count"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan is not a number above 0"),
        ({"rope_theta": 1e300}, "rope_theta = 1e+300 is not a number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' is neither true nor false"),
        ({"rope_parameters": "x"}, "rope_parameters = 'x' is not an object"),
        ({"rope_scaling": [1]}, "rope_scaling = [1] is not an object"),
        ({"rope_scaling": {"rope_type": 5}}, "rope_scaling.rope_type = 5 has another type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor = '2' is not a number above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": []}}, "mscale = [] is not a number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}},
            "original_max_position_embeddings = 'x' is not a valid count",
        ),
    ],
)
def test_fields_of_another_type_are_refused(inputs, changes, message):
    file = inputs / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert refused(inputs).startswith(f"{file}: {message}")


def test_a_field_that_is_null_has_its_default(inputs):
    file = inputs / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": None, "rope_theta": None}))
    check_config(load_config(inputs / "config.yaml"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [DEEP, b'{"a":' * 50_000, b'{"a": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"5"])
def test_documents_that_cannot_be_read_are_refused(inputs, name, content):
    if name == "tokenizer_config.json":  # read only for its chat template
        (inputs / "model" / "chat_template.jinja").unlink()
    (inputs / "model" / name).write_bytes(content)
    assert refused(inputs).startswith(f"{inputs / 'model' / name}: is ")


def _entry(**changes: Any) -> dict[str, Any]:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return {key: value for key, value in entry.items() if value is not Ellipsis}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        *(({"a": _entry(shape=value)}, NO_FILE) for value in (..., None, 5, "x", [-1], [2.0], [[2]])),
        *(({"a": _entry(dtype=value)}, NO_FILE) for value in (..., None, 5, ["F32"])),
        *(({"a": _entry(data_offsets=value)}, NO_FILE) for value in (..., None, [0], [8, 0], ["0", 8])),
        *(({"a": value}, NO_FILE) for value in (None, 5, [[0, 8]])),
        ({"a": _entry(shape=[True, 2])}, NO_FILE),
        ({"a": _entry(shape=[3])}, "'a' has 8 bytes for shape [3] of F32"),
        ({"a": _entry(dtype="F99")}, "'a' has the unknown type 'F99'"),
        ({"a": _entry(data_offsets=[4, 8], shape=[1])}, "'a' begins at byte 4 of the data instead of 0"),
        ({"a": _entry(), "b": _entry()}, "'b' begins at byte 0 of the data instead of 8"),
        (b"[" * 100_000, NO_FILE),
        (b'{"a":' * 100_000, NO_FILE),
    ],
)
def test_headers_of_another_form_are_refused(inputs, header, message):
    file = inputs / "model" / "model.safetensors"
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert refused(inputs).startswith(f"{file}: {message}")


@pytest.mark.parametrize("name", [5, None, "", ".", "n" * 300, "a\0b", "\ud800", "x/" * 3000])
def test_files_that_cannot_be_are_refused_in_an_index(inputs, name):
    index = inputs / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert refused(inputs).startswith(f"{index}: 'a' is outside the model's folder, in ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 5}, "has no vocabulary"),
        ({"model": {"vocab": 5}}, "has no vocabulary"),
        ({"model": {"vocab": {"a": "1"}}}, "1 is not a token's id"),
        ({"model": {"vocab": {"a": None}}}, "None is not a token's id"),
        ({"model": {"vocab": {"a": 0.5}}}, "0.5 is not a token's id"),
        ({"model": {"vocab": {"a": [1]}}}, "[1] is not a token's id"),
        ({"added_tokens": [{"id": -1}]}, "-1 is not a token's id"),
        ({"added_tokens": True}, "added_tokens is not a list of tokens"),
        ({"added_tokens": [5]}, "added_tokens is not a list of tokens"),
        ({"added_tokens": [{}]}, "None is not a token's id"),
        ({"added_tokens": [{"id": {}}]}, "{} is not a token's id"),
    ],
)
def test_odd_tokenizers_are_refused(inputs, changes, message):
    file = inputs / "model" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert refused(inputs).startswith(f"{file}: {message}")


@pytest.mark.parametrize("content", [DEEP + b"\n", b'{"prompt": ' + DEEP + b"}\n", b"\0" * 100 + b"\n"])
def test_odd_first_lines_are_refused(inputs, content):
    (inputs / "train.jsonl").write_bytes(content)
    assert "train.jsonl:1: " in refused(inputs)
    with pytest.raises(UserError, match=r"train\.jsonl:1: "):
        next(read_rows(inputs / "train.jsonl", "data.train.0"))


@pytest.mark.parametrize("name", ["config.yaml", "model/config.json", "model/tokenizer.json", "train.jsonl"])
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/full", "a pipe", "a folder"])
def test_what_is_no_regular_file_is_refused_at_once(inputs, name, target):
    file = inputs / name
    file.unlink()
    if target == "a pipe":
        os.mkfifo(file)  # without a writer, opening it would wait without end
    elif target == "a folder":
        file.mkdir()
    else:
        file.symlink_to(target)
    message = refused(inputs)
    assert Path(name).name in message or name == "model/config.json"
    if target != "a folder" and not name.startswith("model/"):
        assert "is not a regular file" in message


def as_nobody(call: Callable[[], str]) -> str:
    """The call's result in a process of another user."""
    if os.getuid():
        pytest.skip("only root can become another user")
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write_end, call().encode())
        except BaseException:
            os.write(write_end, traceback.format_exc().encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with open(read_end, encoding="utf-8") as pipe:
        return pipe.read()


@pytest.mark.parametrize(
    "name", ["config.yaml", "model/config.json", "model/model.safetensors", "model/tokenizer.json", "train.jsonl"]
)
def test_files_that_may_not_be_read_are_named(inputs, name):
    ours = [folder for folder in inputs.parents if folder.stat().st_mode & 0o7777 == 0o700]  # as pytest makes them
    for folder in (inputs, *ours, inputs / "model"):
        folder.chmod(0o755)
    check_config(load_config(inputs / "config.yaml"))  # imports what another user cannot
    (inputs / name).chmod(0)
    assert as_nobody(lambda: refused(inputs)) == (
        f"{inputs / name}: cannot be read (Permission denied); correct its permissions"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1 / 0\n", r"'odd_\w+' fails when imported \(.*odd_\w+\.py:1: ZeroDivisionError: division by zero\)"),
        ("import sys\nsys.exit(3)\n", r"'odd_\w+' fails when imported \(.*odd_\w+\.py:2: SystemExit: 3\)"),
        ("def f(:\n", r"'odd_\w+' fails when imported \(.*odd_\w+\.py:1: SyntaxError: "),
        ("x = 1\0\n", r"'odd_\w+' fails when imported \(SyntaxError: source code string cannot contain null bytes"),
        ("def f(): f()\nf()\n", r"'odd_\w+' fails when imported \(.*odd_\w+\.py:1: RecursionError: "),
        ("x = " + "-" * 50_000 + "1\n", r"'odd_\w+' fails when imported \(.*(MemoryError|RecursionError): "),
    ],
)
def test_modules_that_fail_when_imported_are_named(tmp_path, monkeypatch, content, message):
    name = f"odd_{abs(hash(content))}"
    (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=rf"model\.family: {message}"):
        import_attribute(f"{name}:FAMILY", "model.family")


@pytest.mark.parametrize("content", ["x = " + "(" * 5000 + ")" * 5000, "x = " + "-" * 50_000 + "1"])
def test_a_module_that_is_nested_too_deeply_is_refused(inputs, content):
    (inputs / "mine.py").write_text(content)
    config = load_config(inputs / "config.yaml", ["rewards.0.function=mine:score"])
    with pytest.raises(UserError, match=r"rewards\.0\.function: .*mine\.py is n"):
        check_own_code(config, inputs)


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl/inside"])
def test_a_run_folder_in_the_place_of_a_file_is_refused(inputs, name):
    message = refused(inputs, f"run_dir={inputs / name}")
    assert message == f"run_dir: '{inputs / 'train.jsonl'}' is not a folder; choose another one"


@pytest.mark.parametrize("name", ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_an_absent_field_is_named(name):
    fields = fields_of("deepseek_v3")
    del fields[name]
    with pytest.raises(UserError, match=f"'{name}' is missing"):
        shape_of(fields)


def test_rows_of_an_endless_file_are_not_counted(tmp_path):
    (tmp_path / "a.jsonl").symlink_to("/dev/zero")
    assert count_rows(tmp_path / "a.jsonl") is None
    (tmp_path / "b.jsonl").write_text("{}\n\n{}\n")
    assert count_rows(tmp_path / "b.jsonl") == 2


def test_a_remedy_lists_each_name_once_and_not_hundreds():
    remedy = did_you_mean("zzz", ["score"] * 500 + [f"name_{number:03d}" for number in range(500)])
    assert (remedy.count("score"), remedy.endswith(" …")) == (0, True)
    assert did_you_mean("zzz", ["score"] * 500) == "valid: score"


def test_an_error_shows_no_control_characters():
    shown = str(UserError("'\x1b[31m\ud800\u202e'", where="a\nb", remedy="fix\tit"))
    assert shown == r"a b: '\x1b[31m\ud800\u202e'; fix it"
