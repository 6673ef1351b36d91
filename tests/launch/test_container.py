"""Ranks in containers: the command lines as golden files, and what a rank sees in a folder that is entered."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.load import absolute_paths, load_config
from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.errors import UserError
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.heartbeat import DUMP_SIGNAL, stacks_file
from rlhpc.core.imports import import_attribute
from rlhpc.launch.container import check_runtime, container_mounts, container_warnings, program_of
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.launch.supervise.srun import srun_command, srun_environment
from tests.core.test_heartbeat import STUCK
from tests.helpers import container_runtime
from tests.helpers.golden import check_text
from tests.helpers.plain_model import write_inputs, write_model
from tests.helpers.waiting import until
from tests.launch import inside

enters = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed; tests/slurm/install.sh does it"
)
IMAGE = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "OF_THE_IMAGE": "1", "HF_HUB_OFFLINE": "0"}
RUNTIMES = ["apptainer", "singularity", "pyxis"]
CODE = "def score(): ...\ndef keep(): ...\ndef make(): ...\n"
KEYS = """
model.weights={base}/hub/snapshots/1
critic.path={base}/critic
rewards=[{{function: own_reward:score, name: a}}, {{model: {base}/reward, chat_template: {base}/site/reward.jinja}}]
data.chat_template={base}/site/chat.jinja
data.filter=libraries.filters:keep
data.validation=[{base}/validation/a.jsonl]
sft={{data: [{base}/sft.jsonl], steps: 1}}
actor.optimizer.function=own_reward:make
slurm.environment={{NCCL_DEBUG: WARN, WANDB_API_KEY: plant3d}}
slurm.container.image={base}/image
slurm.container.python=/usr/bin/env-python
"""


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """A user's folders, with the working folder in the home folder; the job's environment has much that is theirs."""
    home = tmp_path / "home"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (home / ".local" / "lib" / version / "site-packages").mkdir(parents=True)
    work = home / "project"
    work.mkdir()
    write_inputs(tmp_path)
    for folder in ("critic", "reward", "hub/blobs"):
        write_model(tmp_path / folder)
    snapshot = tmp_path / "hub" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "hub" / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    for name in ("site/chat.jinja", "site/reward.jinja", "validation/a.jsonl", "sft.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "code" / "libraries").mkdir(parents=True)
    (tmp_path / "code" / "libraries" / "filters.py").write_text(CODE)
    (work / "own_reward.py").write_text(CODE)
    monkeypatch.chdir(work)
    own = ("SLURM", "APPTAINER", "SINGULARITY", "PYTHON", "CUDA", "SSL", "XDG", "TRITON", "TORCH", "TMPDIR", "FLASH")
    for name in [name for name in os.environ if name.startswith(own) or name.endswith("CA_BUNDLE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CC", "/opt/site/cc")
    monkeypatch.setenv("APPTAINER_CLEANENV", "1")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", f"/opt/site/python:{tmp_path / 'code'}")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("WANDB_API_KEY", "plant3d")
    return tmp_path


def config_of(base: Path, runtime: str, *keys: str) -> RunConfig:
    known = KEYS.format(base=base).split("\n")
    return absolute_paths(
        load_config(base / "config.yaml", [*filter(None, known), f"slurm.container.runtime={runtime}", *keys])
    )


def command_of(config: RunConfig, base: Path) -> list[str]:
    return srun_command(config, ("node1",), AttemptFolder(base / "run" / "attempts" / "0001"))


def environment_of(config: RunConfig) -> dict[str, str]:
    return srun_environment(config, 1, "node1", (20042, b"\x01\xff"), 20777)


# ---- command lines


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_command_is_as_it_was(runtime, base, accept_golden) -> None:
    """From the rank's log on, with the variables that differ from the same job's without a container."""
    mounts = 'slurm.container.mounts=["/scratch","/software:/software:ro"]'
    config = config_of(base, runtime, mounts)
    plain = environment_of(config.model_copy(update={"slurm": config.slurm.model_copy(update={"container": None})}))
    found = environment_of(config)
    changed = [f"{name}={found[name]}" for name in sorted(found) if plain.get(name) != found[name]]
    changed += [f"unset {name}" for name in sorted(plain.keys() - found.keys())]
    command = command_of(config, base)
    begin = next(number for number, word in enumerate(command) if word.startswith("--output="))
    lines = [*(shlex.quote(word) for word in command[begin:]), "", *changed, ""]
    check_text(f"container_{runtime}.txt", "\n".join(lines).replace(str(base), "/base"), accept_golden)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_value_of_a_variable_is_on_the_command_line(runtime, base) -> None:
    command = " ".join(command_of(config_of(base, runtime), base))
    assert "plant3d" not in command
    assert "01ff" not in command


def test_a_container_without_gpus_wants_no_driver(base) -> None:
    keys = ["slurm.gpus_per_node=0"]
    assert "--nv" in command_of(config_of(base, "apptainer"), base)
    assert "--nv" not in command_of(config_of(base, "apptainer", *keys), base)
    assert "NVIDIA_VISIBLE_DEVICES" in environment_of(config_of(base, "pyxis"))
    assert "NVIDIA_VISIBLE_DEVICES" not in environment_of(config_of(base, "pyxis", *keys))


# ---- what a rank sees


Enter = Callable[[list[str], dict[str, str]], tuple[list[str], dict[str, str]]]


def by_stand_in(command: list[str], environ: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one task of srun's command, entered with bubblewrap."""
    runtime = next((word for word in command if word in ("apptainer", "singularity")), None)
    if runtime is None:
        return container_runtime.bwrap(container_runtime.of_srun(command, environ), environ)
    return container_runtime.bwrap(container_runtime.of_exec(command[command.index(runtime) :], environ), environ)


def itself(command: list[str], environ: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The same for the runtime that is installed."""
    return command[command.index("apptainer") :], environ


def seen(config: RunConfig, base: Path, monkeypatch: pytest.MonkeyPatch, enter: Enter = by_stand_in) -> dict[str, Any]:
    """Notes of the only rank of an attempt that begins in the container."""
    monkeypatch.setenv(inside.HOME, str(base / "home"))
    run = RunFolder(base / "run")
    known: dict[str, Any] = {"job_id": "7", "restart_count": 0, "nodes": ("localhost",), "world_size": 1}
    attempt = attempts.begin(run, **known, saved_step=-1)
    save_config(run, config)
    command = srun_command(config, ("localhost",), attempt, "tests.launch.inside:look")
    server = StoreServer.open()
    environ = srun_environment(config, 1, "localhost", (server.port, server.secret), 20777)
    environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}
    entering, environ = enter(command, environ)
    try:
        done = subprocess.run(entering, env=environ, capture_output=True, text=True, check=False, timeout=100)
    finally:
        server.close()
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((run.path / "seen.json").read_text())


@enters
@pytest.mark.workers
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_rank_sees_what_the_run_names_and_nothing_of_the_home_folder(runtime, base, monkeypatch) -> None:
    python = os.path.realpath(sys.executable)
    container_runtime.write_image(base / "image", python, IMAGE)
    (base / "home" / "secret").write_text("")
    keys = [f"slurm.container.python={python}", "resources.threads_per_rank=3", "slurm.gpus_per_node=0"]
    config = config_of(base, runtime, *keys)
    found = seen(config, base, monkeypatch)
    check_seen(found, base)


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="Apptainer is not installed")
@pytest.mark.workers
def test_a_rank_sees_it_in_apptainer_itself(base, monkeypatch) -> None:
    """In a folder as image, whose files are mounts of the user. ``--contain``: its /tmp is not the node's."""
    python = os.path.realpath(sys.executable)
    image = container_runtime.write_folder_image(base / "image", IMAGE)
    mounts = [f"{source}:{place}:ro" for source, place in container_runtime.files_of(python).items()]
    keys = [f"slurm.container.python={python}", "resources.threads_per_rank=3", "slurm.gpus_per_node=0"]
    keys += [f"slurm.container.mounts={json.dumps(mounts)}", "slurm.container.options=[--contain]"]
    config = config_of(base, "apptainer", f"slurm.container.image={image}", *keys)
    found = seen(config, base, monkeypatch, itself)
    check_seen(found, base)


def check_seen(found: dict[str, Any], base: Path) -> None:
    """Check the notes of ``inside.look``."""
    assert len(found["read"]) == 9
    assert [key for key, read in found["read"].items() if not read] == []
    assert found["code"] == {"own_reward:score": "score", "own_reward:make": "make", "libraries.filters:keep": "keep"}
    assert found["home"] == ["project"]
    assert found["cwd"] == str(base / "home" / "project")
    assert not found["user_site"]
    assert found["own_home"]
    expected = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "3", "HF_HUB_OFFLINE": "1", "OF_THE_IMAGE": "1"}
    assert {name: found["environ"].get(name) for name in expected} == expected
    assert "/opt/site/python" not in found["environ"]["PYTHONPATH"]


def test_own_code_is_found_in_the_working_folder_first(base, monkeypatch) -> None:
    """As on the node, where PYTHONPATH comes behind it."""
    (base / "code" / "own_reward.py").write_text("")
    monkeypatch.setattr(sys, "path", ["/image/packages"])
    monkeypatch.setenv("RLHPC_CODE", environment_of(config_of(base, "apptainer"))["RLHPC_CODE"])
    assert import_attribute("own_reward:score", "rewards.0.function")() is None
    assert sys.path == [str(Path.cwd()), str(base / "code"), "/image/packages"]


@enters
@pytest.mark.workers
def test_the_signal_for_stacks_reaches_a_rank_through_its_container(base) -> None:
    """Slurm sends it to the runtime, whose child the rank is."""
    python = os.path.realpath(sys.executable)
    image = container_runtime.write_image(base / "image", python, {})
    program = container_runtime.write_program(base / "bin", "apptainer")
    words = [program, "exec", "--no-home", "--bind", base, "--pwd", base, image, python, "-c", STUCK, base]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(DUMP_SIGNAL)
        try:
            until(lambda: "in in_native_code" in stacks_file(base, 0).read_text())
        finally:
            process.terminate()


# ---- mounts


def mounts_of(config: RunConfig, base: Path, **environ: str) -> list[str]:
    return [mount.full for mount in container_mounts(config, base / "run", Path.cwd(), environ)]


def test_a_mount_of_the_user_takes_precedence(base) -> None:
    """It replaces ours at the same place, and ours in it are mounted after it, so that the run folder is writable."""
    keys = f'slurm.container.mounts=["{base}:{base}:ro","/other:{base}/critic"]'
    found = mounts_of(config_of(base, "apptainer", keys), base)
    assert found[0] == f"{base}:{base}:ro"
    assert f"/other:{base}/critic" in found
    assert f"{base}/critic:{base}/critic" not in found
    assert f"{base}/run:{base}/run" in found


def test_a_run_folder_behind_a_link_of_the_working_folder(base) -> None:
    """The link is seen there, so that what it leads to is mounted."""
    (base / "big").mkdir()
    Path("runs").symlink_to(base / "big")
    config = config_of(base, "apptainer")
    found = [mount.full for mount in container_mounts(config, Path.cwd() / "runs" / "a", Path.cwd(), {})]
    assert f"{base}/big/a:{base}/big/a" in found
    assert not any("project/runs" in mount for mount in found)


def test_many_files_of_a_folder_are_one_mount(base) -> None:
    (base / "many").mkdir()
    files = [str(base / "many" / f"{number}.jsonl") for number in range(9)]
    found = mounts_of(config_of(base, "apptainer", f"data.train={json.dumps(files)}"), base)
    assert f"{base}/many:{base}/many" in found
    assert not any("/many/" in mount for mount in found)


def test_files_in_the_home_folder_do_not_bring_it_along(base) -> None:
    files = [str(base / "home" / f"{number}.jsonl") for number in range(9)]
    found = mounts_of(config_of(base, "apptainer", f"data.train={json.dumps(files)}"), base)
    assert f"{files[0]}:{files[0]}" in found
    assert f"{base}/home:{base}/home" not in found


def test_the_folder_of_temporary_files_that_all_nodes_have(base) -> None:
    (base / "local" / "job7").mkdir(parents=True)
    config = config_of(base, "apptainer")
    assert f"{base}/local:{base}/local" in mounts_of(config, base, TMPDIR=str(base / "local" / "job7"))
    assert "/tmp:/tmp" in mounts_of(config_of(base, "pyxis"), base, TMPDIR="/tmp")
    assert "/tmp:/tmp" not in mounts_of(config, base, TMPDIR="/tmp"), "Apptainer mounts it itself"


@pytest.mark.parametrize(
    ("runtime", "key", "value", "sign"),
    [
        ("apptainer", "critic.path", "/models/a:b", ":"),
        ("singularity", "critic.path", "/models/a,b", ","),
        ("pyxis", "critic.path", "/models/a b", " "),
        ("pyxis", "slurm.container.mounts", "[/models/a b]", " "),
    ],
)
def test_a_path_that_the_runtime_cannot_mount(runtime, key, value, sign, base) -> None:
    with pytest.raises(UserError) as caught:
        mounts_of(config_of(base, runtime, f"{key}={value}"), base)
    expected = f"{key}: {value.strip('[]')!r} cannot be mounted into a container: it contains {sign!r}; rename it"
    assert str(caught.value) == expected
    if sign == " ":
        mounts_of(config_of(base, "apptainer", f"{key}={value}"), base)


def test_a_name_that_is_too_long_is_left_to_other_checks(base) -> None:
    name = base / ("a" * 300)
    config = config_of(base, "apptainer", f"model.weights={name}/actor", f"slurm.container.image={name}.sif")
    assert container_warnings(config, base / "run", Path.cwd())[0].endswith("all nodes must see it")


# ---- the runtime


def test_singularity_runs_where_there_is_no_apptainer(base, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(base / "bin"))
    container = config_of(base, "apptainer").slurm.container
    assert container is not None
    container_runtime.write_program(base / "bin", "singularity")
    assert program_of(container) == "singularity"
    container_runtime.write_program(base / "bin", "apptainer")
    assert program_of(container) == "apptainer"


def test_apptainer_under_its_former_name_gets_its_own_variables(base, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(base / "bin"))
    file = container_runtime.write_program(base / "bin", "singularity")
    config = config_of(base, "singularity")
    assert environment_of(config)["SINGULARITYENV_PYTHONNOUSERSITE"] == "1"
    file.rename(base / "bin" / "apptainer")
    file.symlink_to("apptainer")
    assert environment_of(config)["APPTAINERENV_PYTHONNOUSERSITE"] == "1"


@pytest.mark.parametrize(
    ("runtime", "fault"),
    [
        ("apptainer", "neither apptainer nor singularity is on PATH of node "),
        ("singularity", "no singularity is on PATH of node "),
        ("pyxis", "srun has no --container-image: Pyxis is not installed"),
    ],
)
def test_a_node_without_the_runtime(runtime, fault, base, monkeypatch) -> None:
    (base / "bin").mkdir()
    (base / "bin" / "srun").write_text("#!/bin/sh\necho 'Usage: srun [OPTIONS...]'\n")
    (base / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(base / "bin"))
    with pytest.raises(UserError) as caught:
        check_runtime(config_of(base, runtime))
    assert str(caught.value).startswith(f"slurm.container.runtime: {fault}")
    assert "slurm.modules" in str(caught.value)


@pytest.mark.parametrize(
    ("runtime", "image", "warning"),
    [
        ("apptainer", "docker://a/b:1", "every rank would fetch and convert it"),
        ("pyxis", "docker://a/b:1", ""),
        ("apptainer", "images/a.sif", "is not on this machine"),
        ("pyxis", "a/b:1", ""),
    ],
)
def test_warnings_of_an_image(runtime, image, warning, base) -> None:
    config = config_of(base, runtime, f"slurm.container.image={image}")
    found = container_warnings(config, base / "run", Path.cwd())
    assert [warning in text for text in found] == ([True] if warning else [])
