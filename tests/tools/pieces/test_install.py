"""The installer on a bare machine: pieces that arrive a few at a time, without network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.pieces.small import HERE, THIS_MACHINE, index_for_rlhpc
from tools.pieces.install_pieces import Stop, check_imports
from tools.pieces.prepare import PrepareOptions, prepare
from tools.pieces.target import read_target

NO_NETWORK = ("unshare", "--map-root-user", "--net")
NAMESPACES = shutil.which("unshare") and subprocess.run([*NO_NETWORK, "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with only pip."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def pieces(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set for that environment: rlhpc, and a small wheel per required package."""
    folder = tmp_path_factory.mktemp("pieces")
    index_for_rlhpc(folder / "index")
    listed = subprocess.run([bare, "-m", "pip", "inspect"], check=True, capture_output=True, text=True)
    (folder / "target.json").write_text(listed.stdout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder / "index"))
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        target = read_target(folder / "target.json", THIS_MACHINE)
        prepare(PrepareOptions(target, lzma=True, piece_mb=0.25, import_check=False), folder / "out")
    return folder / "out"


@pytest.fixture
def arrive(pieces: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy the installer, the manifest and these pieces to a new folder."""

    def copy(name: str, *files: str) -> Path:
        (folder := tmp_path / name).mkdir()
        for file in ("install_pieces.py", "manifest.json", *files):
            shutil.copy(pieces / file, folder)
        return folder

    return copy


def names(pieces: Path) -> list[str]:
    return [piece["file"] for piece in json.loads((pieces / "manifest.json").read_text())["pieces"]]


def call(python: Path | str, folder: Path, *options: object, setting: tuple[str, ...] = ()) -> tuple[int, str, str]:
    command = [*setting, str(python), str(folder / "install_pieces.py"), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.heavy
@pytest.mark.skipif(not NAMESPACES, reason="no network namespaces here: this test DID NOT RUN")
def test_a_bare_environment_without_network_gets_all_it_needs(pieces: Path, bare: Path, arrive, tmp_path: Path) -> None:
    first, second = arrive("first", *names(pieces)[:2]), arrive("second", *names(pieces)[2:])
    target = tmp_path / "site"
    interfaces = "import socket; print(socket.if_nameindex())"
    done = subprocess.run([*NO_NETWORK, bare, "-c", interfaces], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[(1, 'lo')]"

    code, _, errors = call(bare, first, "--target", target, setting=NO_NETWORK)
    assert code == 3
    assert f"bring {', '.join(names(pieces)[2:])} and run again" in errors
    shutil.rmtree(first)  # the next pieces replace these

    code, exports, errors = call(bare, second, "--target", target, setting=NO_NETWORK)
    assert code == 0, errors
    assert [line.partition(",")[0] for line in errors.splitlines() if line.startswith("import ")] == [
        "import rlhpc.cli.main: works",
        "import megatron.core: works",
        "import vllm.entrypoints.llm: works",
    ]
    script = f"{exports}\nrlhpc --version && cd / && {bare} -c 'import rlhpc; print(rlhpc.__file__)'"
    done = subprocess.run([*NO_NETWORK, "sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(target / "rlhpc" / "__init__.py")

    code, again, errors = call(bare, arrive("third"), "--target", target, setting=NO_NETWORK)
    assert (code, again, errors) == (0, exports, "already installed: nothing to do\n")
    (metadata,) = target.glob("vllm-*.dist-info")
    shutil.rmtree(metadata)
    code, _, errors = call(bare, arrive("fourth"), "--target", target, setting=NO_NETWORK)
    assert (code, "0 of" in errors) == (3, True)


@pytest.mark.heavy
def test_a_damaged_piece_is_named_and_not_stored(pieces: Path, bare: Path, arrive, tmp_path: Path) -> None:
    folder = arrive("here", *names(pieces))
    damaged = folder / names(pieces)[1]
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    cut = folder / names(pieces)[2]
    cut.write_bytes(cut.read_bytes()[:-1])
    code, _, errors = call(bare, folder, "--target", tmp_path / "site")
    assert code == 3
    assert f"{damaged} is damaged" in errors
    assert f"{cut} is damaged" in errors
    assert f"bring {damaged.name}, {cut.name} and run again" in errors
    stored = {path.name for path in tmp_path.glob("site.pieces/*/pieces/*")}
    assert stored == {*names(pieces)} - {damaged.name, cut.name}


@pytest.mark.heavy
def test_another_python_is_refused(pieces: Path, bare: Path, arrive, tmp_path: Path) -> None:
    folder = arrive("here", *names(pieces))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["target"]["python"] = "3.99"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    code, _, errors = call(bare, folder, "--target", tmp_path / "site")
    assert code == 2
    assert f"the pieces are for Python 3.99 on {manifest['target']['machine']}, and {bare} is Python {HERE}" in errors


def test_without_a_manifest_the_installer_names_it(tmp_path: Path) -> None:
    script = Path(check_imports.__code__.co_filename)
    done = subprocess.run([sys.executable, script, "--pieces", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{tmp_path / 'manifest.json'}: no manifest" in done.stderr


def test_an_import_that_fails_is_named_and_so_is_a_process_that_dies(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(7)")
    (tmp_path / "fine.py").touch()
    with pytest.raises(Stop, match="imports fail: absent_module: ModuleNotFoundError") as error:
        check_imports(["fine", "absent_module"], tmp_path)
    assert error.value.code == 1
    with pytest.raises(Stop, match="imports fail: deadly: the process ended with 7"):
        check_imports(["fine", "deadly"], tmp_path)
