"""Models that the FSDP back end cannot train are refused before a run; results of the proof are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.preflight import check_architectures
from rlhpc.plan.checks import architecture
from rlhpc.plan.checks.architecture import (
    ENGINE,
    TRAINER,
    ProbeResult,
    Proof,
    check_results,
    probed_folders,
    served_folders,
)
from tests.cli.test_light import call
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs, write_model

FSDP = "train.backend=fsdp"
WORKS, FAILS = ProbeResult(works=True), ProbeResult(works=False, reason="packed documents influence each other")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.XDG_CACHE_HOME, str(tmp_path / "cache"))
    return tmp_path / "cache"


def _keep(folder: Path, result: ProbeResult, proof: Proof = TRAINER) -> None:
    """As if the folder had been probed."""
    file = proof.file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result.as_json()))


@pytest.fixture
def prover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in Python's place that finds everything good."""
    program = tmp_path / "prover"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(WORKS.as_json())}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.workers
def test_a_process_proves_and_its_result_is_kept(tmp_path: Path) -> None:
    """No module of torch or transformers is imported here: a fresh interpreter asks."""
    folder = write_model(tmp_path / "model", model_type="qwen2")
    code = (
        "import json, sys; from pathlib import Path; from rlhpc.plan.checks.architecture import TRAINER\n"
        f"print(json.dumps([TRAINER.result(Path({str(folder)!r})).as_json(), 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result, imported = json.loads(done.stdout)
    assert result["works"]
    assert result["differences"]
    assert not imported
    assert ProbeResult.from_json(json.loads(TRAINER.file(folder).read_text())) == ProbeResult(**result)


def test_a_kept_result_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", model_type="qwen2")
    _keep(folder, FAILS)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert TRAINER.result(folder) == FAILS


@pytest.mark.parametrize("text", ["", "[1]", '{"works": true}', '{"works": 1, "reason": "", "longest": null, "x": {}}'])
def test_a_broken_cache_file_is_ignored_and_replaced(tmp_path: Path, prover: None, text: str) -> None:
    folder = write_model(tmp_path / "model", model_type="qwen2")
    _keep(folder, FAILS)
    TRAINER.file(folder).write_text(text)
    assert TRAINER.result(folder) == WORKS
    assert json.loads(TRAINER.file(folder).read_text())["works"] is True


def test_a_result_is_of_a_config_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, same = (write_model(tmp_path / name, model_type="qwen2") for name in ("a", "b"))
    other = write_model(tmp_path / "c", model_type="qwen2", num_hidden_layers=1)
    assert TRAINER.file(first) == TRAINER.file(same) != ENGINE.file(same)
    assert TRAINER.file(other) != TRAINER.file(first)
    before = TRAINER.file(first)
    for name in ("rlhpc", "torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(architecture, "version", lambda package, name=name: str(package == name))
            assert TRAINER.file(first) != before


def test_a_cache_that_cannot_be_written_costs_the_next_proof(tmp_path: Path, prover: None, cache: Path) -> None:
    cache.write_text("a file in the place of the folder")
    assert TRAINER.result(write_model(tmp_path / "model", model_type="qwen2")) == WORKS


def test_a_process_that_fails_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    folder = write_model(tmp_path / "model", model_type="qwen2")
    assert TRAINER.result(folder) is None
    assert not TRAINER.file(folder).exists()


@pytest.mark.heavy
def test_a_login_node_leaves_the_proof_to_the_job(tmp_path: Path) -> None:
    config = str(write_inputs(tmp_path, model_type="qwen2"))
    code, output, errors = call(tmp_path, "run", config, "--check", FSDP)
    assert (code, errors) == (0, "")
    expected = "model.path: no proof here that train.backend fsdp computes as transformers does: the job's first minute"
    assert expected in output


def test_a_refused_model_is_one_line_with_its_key(tmp_path: Path) -> None:
    config = write_inputs(tmp_path, model_type="qwen2")
    _keep(tmp_path / "model", FAILS)
    held_out = f"data.validation=[{tmp_path / 'train.jsonl'}]"
    expected = "train.backend fsdp cannot train this architecture: packed documents influence each other"
    for command in (
        ["run", "--check"],
        ["submit", "--dry-run", "slurm.gpus_per_node=1"],
        ["eval", "--check", held_out],
    ):
        done = invoke(command[0], str(config), *command[1:], FSDP)
        assert isinstance(done.exception, UserError), (command, done.output)
        assert str(done.exception).startswith(f"model.path: {expected}"), command
    done = invoke("run", str(config), "--check")
    assert done.exit_code == 0, "megatron needs no proof"


def test_every_model_of_a_run_is_proved(tmp_path: Path) -> None:
    config = write_inputs(tmp_path, model_type="qwen2")
    critic, reward = (write_model(tmp_path / name, model_type="qwen2") for name in ("critic", "reward"))
    changes = [FSDP, "algorithm.name=ppo", f"critic.path={critic}", f"rewards.0={{model: {reward}}}"]
    loaded = load_config(config, changes)
    assert probed_folders(loaded) == {
        "model.path": tmp_path / "model",
        "critic.path": critic,
        "rewards.0.model": reward,
    }
    with pytest.raises(UserError, match=r"^critic\.path: train\.backend fsdp cannot train"):
        check_results(loaded, {"model.path": WORKS, "critic.path": FAILS})
    assert probed_folders(load_config(config, ["model.path=/nowhere", FSDP])) == {}


def test_code_of_a_folder_is_not_proved(tmp_path: Path) -> None:
    config, file = write_inputs(tmp_path, model_type="qwen2"), tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoConfig": "own.Config"}}))
    loaded = load_config(config, [FSDP, "model.trust_remote_code=true"])
    assert list(check_architectures([loaded])) == [
        "model.trust_remote_code: nothing proves that the folder's own code trains as it computes"
    ]


def test_long_documents_are_refused_where_the_pack_would_change_them(tmp_path: Path) -> None:
    loaded = load_config(write_inputs(tmp_path, model_type="qwen2"), [FSDP])
    check_results(loaded, {"model.path": ProbeResult(works=True, longest=64)})
    with pytest.raises(UserError, match=r"^rollout\.max_response_tokens: 64 tokens of a prompt .* beyond 63"):
        check_results(loaded, {"model.path": ProbeResult(works=True, longest=63)})


def test_an_engine_that_computes_otherwise_is_refused_by_its_kept_proof(tmp_path: Path) -> None:
    config = write_inputs(tmp_path, model_type="qwen2")
    reason = "vLLM ignores clip_qkv = 8.0 (config.json): log-probs differ by 2.1 nats"
    _keep(tmp_path / "model", ProbeResult(works=False, reason=reason), ENGINE)
    for command in (["run", "--check"], ["submit", "--dry-run", "slurm.gpus_per_node=1"]):
        done = invoke(command[0], str(config), *command[1:])
        assert isinstance(done.exception, UserError), (command, done.output)
        expected = "model.path: vLLM does not compute this model as transformers does: "
        assert str(done.exception).startswith(expected + reason), command


def test_check_proves_the_engine_where_it_is_asked_to(tmp_path: Path, prover: None) -> None:
    config = write_inputs(tmp_path, model_type="qwen2")
    loaded = load_config(config)
    assert list(check_architectures([loaded])) == []
    assert ENGINE.kept(tmp_path / "model") is None
    assert list(check_architectures([loaded], engine=True)) == []
    assert ENGINE.kept(tmp_path / "model") == WORKS


def test_a_proof_of_the_engine_that_cannot_run_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    loaded = load_config(write_inputs(tmp_path, model_type="qwen2"))
    (warning,) = check_architectures([loaded], engine=True)
    assert warning.startswith("model.path: no proof here that vLLM computes as transformers does: the log-probs of the")


def test_engines_have_no_proof_of_fixed_rope_or_without_responses(tmp_path: Path) -> None:
    config = write_inputs(tmp_path, model_type="qwen2")
    assert served_folders(load_config(config)) == {"model.path": tmp_path / "model"}
    assert served_folders(load_config(config, ["model.rope_tokens=64"])) == {}
