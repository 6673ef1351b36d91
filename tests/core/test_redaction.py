"""What is a secret, and what stays as it is."""

from __future__ import annotations

import io
import logging
import os
import pickle
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.config.site import SiteFile
from rlhpc.core import redaction
from rlhpc.core.errors import UserError
from rlhpc.core.redaction import guard_output, hide, is_secret, learn, leaves, redact, redact_known, restore

ROOT = Path(__file__).parents[2]
# Names that hold secrets, and others.
SECRETS = """
WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN OPENAI_API_KEY
AWS_SECRET_ACCESS_KEY SLURM_JWT PGPASSWORD RLHPC_STORE_SECRET CLIENT_SECRET SITE_SIGNING_KEY GITHUB_PAT
DB_PASS api_key apiKey judge_api_key password db-password token hf_token rewards.0.arguments.access_token
credentials client_secret private_key
"""
OTHERS = """
tokenizer max_tokens special_tokens tokens_per_second eos_token pad_token BOS_TOKEN own_tokenizer PWD OLDPWD
SSH_AUTH_SOCK prompt_key label_key sort_key key keys AWS_ACCESS_KEY_ID first_token_id PUBLIC_KEY monkey
TOKENIZERS_PARALLELISM passed compass secretary
"""


@pytest.fixture(autouse=True)
def nothing_learned(monkeypatch):
    """Other tests in this process may have learned any word."""
    monkeypatch.setattr(redaction, "_learned", set())


@pytest.mark.parametrize(
    "name",
    SECRETS.split(),
)
def test_a_name_of_a_secret(name):
    assert is_secret(name, "a1b2c3d4e5")
    assert redact(f"with {name}=a1b2c3d4e5, ok") == f"with {name}=***, ok"
    assert redact(repr({name: "a1b2c3d4e5"})) == repr({name: "***"})


@pytest.mark.parametrize(
    "name",
    OTHERS.split(),
)
def test_a_name_of_something_else(name):
    assert not is_secret(name, "a1b2c3d4e5")
    for text in (
        f"with {name}=a1b2c3d4e5, ok",
        repr({name: "a1b2c3d4e5"}),
        f"--{name} a1b2c3d4e5",
        f"{name}: a1b2c3d4",
    ):
        assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://me:p@ss@host:80/x?q=a@b", "at https://***@host:80/x?q=a@b"),
        ("'http:/me:pw@host/x'", "'http:/***@host/x'"),  # as pathlib writes it
        ("git+https://abc123@host/x.git", "git+https://***@host/x.git"),
        ("git+ssh://git@host/x.git and me@host and nfs:/data@daily/x", None),
        ("?api_key=a1&x=2&X-Amz-Signature=abc&sig=d%2Fe", "?api_key=a1&x=2&X-Amz-Signature=***&sig=***"),
        ("?token=a1b2c3d4e5&x=2", "?token=***&x=2"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer ***"),
        ("a hf_abcdefghijklmnop1234 b", "a *** b"),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIx.SflKxwRJSMeK", "***"),
        ("login --token abcd1234 --max-tokens 512", "login --token *** --max-tokens 512"),
        ("k: slurm.environment.A_TOKEN: ab12cd34 is not", "k: slurm.environment.A_TOKEN: *** is not"),
        ("rewards.0.arguments.api_key: must be given; password: see the page", None),
        ("export A_TOKEN=$OTHER; token: 151643; token='<|im_end|>'", None),
        (repr({"api_key": "a \"'b", "n": 1}), "{'api_key': '***', 'n': 1}"),
        ('{"api_key": "a\\"b", "n": 1}', '{"api_key": "***", "n": 1}'),
    ],
)
def test_text(text, shown):
    assert redact(text) == (text if shown is None else shown)


def test_a_value_is_known_by_the_variable_that_holds_it(monkeypatch):
    """As it is, escaped, in a URL, line by line; short words that logs contain by chance stay."""
    monkeypatch.setenv("MY_PASSWORD", "it's/Plant3d 1")
    monkeypatch.setenv("MY_SSH_KEY", "-----BEGIN-----\nPlant3dLine1\nPlant3dLine2\n")
    monkeypatch.setenv("OTHER_PASSWORD", "root")
    monkeypatch.setenv("THIRD_PASSWORD", "123456")
    monkeypatch.setenv("DATABASE", "postgres://me:Plant3d%40db@host/x")
    text = "it's/Plant3d 1 | it\\'s/Plant3d 1 | it%27s%2FPlant3d%201 | Plant3dLine2 | /root/x 123456 | Plant3d@db"
    assert redact_known(text) == "*** | *** | *** | *** | /root/x 123456 | ***"
    monkeypatch.delenv("MY_PASSWORD")
    assert "it's/Plant3d 1" in redact_known(text)


def test_a_value_is_known_from_settings():
    learn({"judge": [{"api_key": "Plant3d-learned", "retries": 3}], "endpoint": "https://me:Plant3d-url@host/"})
    assert redact_known("Plant3d-learned, 3, Plant3d-url") == "***, 3, ***"


def test_hidden_settings_are_restored():
    tree = {
        "a.b": {"api_key": "x", "items": [1, {"password": 12345}], "none": None, "token": True},
        "credentials": {"user": "me", "deep": ["p"]},
        "path": "https://me:pw@host/x",
        "plain": "max_tokens=3",
    }
    shown, secrets = hide(tree)
    plain = [1, None, True, "max_tokens=3"]
    assert [value for _, value in leaves(shown) if value in plain] == plain
    assert [value for _, value in leaves(shown) if value not in plain] == ["***"] * 4 + ["https://***@host/x"]
    assert "12345" not in str(shown)
    assert restore(shown, secrets) == tree
    shown["path"] = "https://other/"
    assert restore(shown, secrets)["path"] == "https://other/", "a new value stays"
    assert hide({"tokenizer": "x", "n": 1}) == ({"tokenizer": "x", "n": 1}, None)


def test_no_other_key_of_ours_looks_like_one_of_a_secret():
    """Their values stay in config.yaml. The URL of a webhook lets anyone post."""

    def names(schema: dict) -> set[str]:
        return {name for section in schema["$defs"].values() for name in section.get("properties", ())}

    found = names(RunConfig.model_json_schema()) | names(SiteFile.model_json_schema())
    assert len(found) > 100
    assert {name for name in found if is_secret(name, "a1b2c3d4e5")} == {"webhook"}


def test_errors_and_representations_show_none():
    error = UserError("401 for https://me:Plant3d@host", where="api_key=Plant3d1", remedy="unset MY_TOKEN=Plant3d")
    assert "Plant3d" not in f"{error} {error.where} {error.remedy}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == (
        "api_key=***: 401 for https://***@host; unset MY_TOKEN=***"
    )  # fmt: skip
    config = RunConfig.model_validate(
        {
            "name": "x",
            "model": {"path": "https://me:Plant3d@host"},
            "train": {"steps": 1},
            "slurm": {"environment": {"A_TOKEN": "Plant3d"}},
        }
    )
    assert "Plant3d" not in repr(config)
    assert "'A_TOKEN': '***'" in repr(config)


def test_all_that_python_prints_is_guarded():
    """print, logs of handlers made before, warnings and the traceback at the end; bytes and lengths are as usual."""
    program = (
        "import logging, os, sys, warnings\n"
        "logging.basicConfig(stream=sys.stderr)\n"
        "from rlhpc.core.redaction import guard_output\n"
        "guard_output(); guard_output()\n"
        "secret = os.environ['MY_TOKEN']\n"
        "assert sys.stdout.write('four') == 4\n"
        "print('out', secret, 'max_tokens=3', secret); print(f'{secret}\\n' * 2, file=sys.stderr)\n"
        "sys.stdout.writelines([secret]); logging.error('log %s', secret); warnings.warn(secret)\n"
        "os.fork() or os._exit(print('child', secret, flush=True) or 0)\n"
        "os.wait()\n"
        "raise RuntimeError(secret) from KeyError(secret)\n"
    )
    environ = {**os.environ, "MY_TOKEN": "Plant3d-guarded", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 1
    assert "Plant3d" not in done.stdout + done.stderr
    assert "out *** max_tokens=3 ***" in done.stdout
    assert "child ***" in done.stdout
    for line in ("ERROR:root:log ***", "UserWarning: ***", "KeyError: '***'", "RuntimeError: ***"):
        assert line in done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize(
    "text", ["a" * 1_000_000, "a:" * 300_000, "'" * 300_000, "password" * 50_000, "a:/b" * 100_000, "key='" * 50_000]
)
def test_no_text_takes_long(text):
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 5


def test_a_stream_without_write_is_left():
    """As of a process started without stdout."""
    stream = io.StringIO()
    with redirect_stdout(None), redirect_stderr(stream):
        guard_output()
    logging.StreamHandler(stream).emit(logging.makeLogRecord({"msg": "password=Plant3d"}))
    assert stream.getvalue() == "password=***\n"
