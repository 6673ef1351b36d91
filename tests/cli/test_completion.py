"""Completion in real shells: commands, options, names of runs, files; quick, and silent where nothing fits."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.cli.setup import SHELLS
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run_registry import known_names, new_record, register
from tests.cli.test_light import HEAVY, ROOT, least_work
from tests.helpers.commands import invoke

BINARIES = Path(sys.executable).parent
SECONDS = 30.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a submitted run, in a folder with a local one and a configuration."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{BINARIES}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "math-local").mkdir(parents=True)
    (tmp_path / "runs" / "odd\nname").mkdir()
    (tmp_path / "other-folder").mkdir()
    register(RunFolder(tmp_path / "other-folder"), new_record("7", "math-submitted", tmp_path, tmp_path / "log"))
    (tmp_path / "my-config.yaml").write_text("name: x\n")
    return tmp_path


def words(line: str) -> list[str]:
    """What the command answers to bash at the end of a line: type and value of each word."""
    count = line.count(" ")
    variables = {"_RLHPC_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    result = invoke(prog_name="rlhpc", env=variables, catch_exceptions=False)
    assert result.stderr == ""
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rlhpc sta", ["status"]),
        ("rlhpc plan se", ["search"]),
        ("rlhpc samples --tr", ["--training", "--truncated"]),
        ("rlhpc status math", ["math-local", "math-submitted"]),
        ("rlhpc logs math-s", ["math-submitted"]),
        ("rlhpc eval my-config.yaml --run math-l", ["math-local"]),
        ("rlhpc completion f", ["fish"]),
        ("rlhpc configs dap", ["dapo"]),
        ("rlhpc run my", ["file,my"]),
        ("rlhpc status zzz", ["file,zzz"]),
        ("rlhpc plan none ", ["calibrate", "measure", "run", "search"]),
    ],
)
def test_a_line_is_completed(line: str, found: list[str], home: Path) -> None:
    assert words(line) == [word if "," in word else f"plain,{word}" for word in found]


@pytest.mark.heavy
def test_a_terminal_with_bash_completes(home: Path) -> None:
    """Tab after tab, as a user types; the line is then printed instead of run."""
    (home / ".inputrc").write_text("set bell-style none\nset enable-bracketed-paste off\n")
    setup = b"PS1='rea''dy> '; eval \"$(rlhpc completion bash)\"\r"
    child, terminal = pty.fork()
    if child == 0:
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        os.write(terminal, setup)
        _read_until(terminal, b"ready> ")
        for typed, shown in (
            (b"rlhpc samp\t", b"samples "),
            (b"math-s\t", b"math-submitted "),
            (b"--trai\t", b"--training "),
        ):
            os.write(terminal, typed)
            _read_until(terminal, shown)
        os.write(terminal, b"\x01echo [\x05]\r")
        _read_until(terminal, b"[rlhpc samples math-submitted --training ]")
    finally:
        os.write(terminal, b"\x03exit\r")
        os.close(terminal)
        os.waitpid(child, 0)


def _read_until(terminal: int, end: bytes) -> bytes:
    text, deadline = b"", time.monotonic() + SECONDS
    while end not in text:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], text
        text += os.read(terminal, 4096)
    return text


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_s_script_is_valid(shell: str) -> None:
    script = invoke("completion", shell, catch_exceptions=False).stdout
    assert f"_RLHPC_COMPLETE={shell}_complete" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", "-c", script] if shell != "fish" else [shell, "-n"], input=script, text=True)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("shell", "word", "answer"),
    [("bash", "1", "plain,status\n"), ("zsh", "1", "plain\nstatus\nShow the state of runs.\n")],
)
def test_the_command_answers_each_shell(shell: str, word: str, answer: str, home: Path) -> None:
    variables = {**os.environ, "_RLHPC_COMPLETE": f"{shell}_complete", "COMP_WORDS": "rlhpc stat", "COMP_CWORD": word}
    done = subprocess.run([BINARIES / "rlhpc"], env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (answer, "")


def test_names_of_earlier_versions_and_damaged_entries(home: Path) -> None:
    folder = home / "state" / "rlhpc" / "runs"
    (folder / "a.json").write_text(json.dumps({"folder": str(home / "older")}))
    (folder / "b.json").write_text("{")
    (folder / "c.json").write_text("[]")
    assert known_names() == ["math-local", "math-submitted", "older"]


@pytest.mark.heavy
def test_a_completion_is_quick(home: Path) -> None:
    """Four times the import of click, which takes 0.03 s."""
    code = f"import os, sys; os.chdir({str(home)!r}); sys.argv[0] = 'rlhpc'; from rlhpc.cli.main import main; main()"
    variables = ["env", "_RLHPC_COMPLETE=bash_complete", "COMP_WORDS=rlhpc status ma", "COMP_CWORD=2"]
    command = [*variables, f"PYTHONPATH={ROOT}", sys.executable, "-c", code]
    base, used = least_work([sys.executable, "-c", "import click"], command)
    print(f"{used:.3f} s, click {base:.3f} s")
    assert used < 4 * base


def test_a_completion_imports_nothing_heavy(home: Path) -> None:
    code = """
import atexit, sys
atexit.register(lambda: print("loaded:", *{name.split(".")[0] for name in sys.modules}, file=sys.stderr))
from rlhpc.cli.main import main
main()
"""
    variables = {**os.environ, "_RLHPC_COMPLETE": "bash_complete", "COMP_WORDS": "rlhpc status ma", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, cwd=home, capture_output=True, text=True)
    assert done.stdout.split() == ["plain,math-local", "plain,math-submitted"]
    assert not set(done.stderr.split()) & {*HEAVY, "numpy", "pydantic", "yaml", "rich", "submitit"}
