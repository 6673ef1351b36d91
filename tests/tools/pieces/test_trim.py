"""Trimmed wheels are valid wheels."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from rlhpc.core.errors import UserError
from tests.tools.pieces.small import wheel
from tools.pieces.wheels import has_large_files, parse_trims, read_wheel, trim, write_wheel

FILES = {"a/__init__.py": "x = 1\n", "a/fat,one.so": "s" * 5000, "a/include/b.h": "h" * 300, "a/rest.py": ""}


def record_faults(path: Path) -> list[str]:
    """Rows of RECORD that differ from the archive, by the wheel specification."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(name).decode()))}
        faults = [f"{entry} has no row" for entry in archive.namelist() if entry not in rows]
        for entry, (digest, size) in rows.items():
            if entry == name:
                continue
            if entry not in archive.namelist():
                faults.append(f"{entry} is no file")
                continue
            content = archive.read(entry)
            hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            if (digest, size) != (f"sha256={hashed}", str(len(content))):
                faults.append(f"{entry} has another row")
    return faults


def test_a_trimmed_wheel_has_a_record_of_the_files_that_are_left(tmp_path: Path) -> None:
    path = wheel(tmp_path, "a", "1.0", ["b>=2"], FILES)
    assert record_faults(path) == []
    (out := tmp_path / "out").mkdir()
    trimmed = trim(path, ["a/fat*.so", "a/include/*"], out)
    assert (trimmed.files, trimmed.unpacked_bytes) == (2, 5300)
    assert record_faults(out / path.name) == []
    with zipfile.ZipFile(out / path.name) as archive:
        assert [name for name in archive.namelist() if name.startswith("a/")] == ["a/__init__.py", "a/rest.py"]
    assert read_wheel(out / path.name).requires == ("b>=2",)


def test_the_check_of_records_sees_a_file_without_a_row(tmp_path: Path) -> None:
    path = wheel(tmp_path, "a", "1.0", (), FILES)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/added.py", "")
    assert record_faults(path) == ["a/added.py has no row"]


def test_large_files_shrink_with_lzma_and_stay_the_same(tmp_path: Path) -> None:
    noise = "".join(hashlib.sha256(bytes([i])).hexdigest() for i in range(256))  # repeats beyond deflate's window
    path = wheel(tmp_path, "a", "1.0", (), {"a/kernels.so": noise * 64 * 3})
    assert has_large_files(path)
    (out := tmp_path / "out").mkdir()
    assert trim(path, (), out, lzma=True).files == 0
    assert record_faults(out / path.name) == []
    assert (out / path.name).stat().st_size < path.stat().st_size / 2
    with zipfile.ZipFile(out / path.name) as archive:
        assert archive.getinfo("a/kernels.so").compress_type == zipfile.ZIP_LZMA
        assert archive.read("a/kernels.so").decode() == noise * 64 * 3


def test_programs_stay_executable(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, "a-1.0-py3-none-any", [("a-1.0.dist-info/METADATA", b"Name: a\nVersion: 1.0\n")])
    with zipfile.ZipFile(path, "a") as archive:
        (program := zipfile.ZipInfo("a/run")).external_attr = 0o100755 << 16
        archive.writestr(program, "#!")
        archive.writestr("a/other", "")
    (out := tmp_path / "out").mkdir()
    trim(path, ["a/other"], out)
    with zipfile.ZipFile(out / path.name) as archive:
        assert archive.getinfo("a/run").external_attr >> 16 == 0o100755


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        (["a/*.so", "a/*.cu"], "no file of a-1.0-py3-none-any.whl matches 'a/*.cu'"),
        (["*"], "matches the wheel's own metadata"),
    ],
)
def test_a_glob_that_cannot_be_meant_is_refused(tmp_path: Path, globs: list[str], message: str) -> None:
    path = wheel(tmp_path, "a", "1.0", (), FILES)
    (out := tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="--trim: ") as error:
        trim(path, globs, out)
    assert message in str(error.value)


def test_uses_and_globs_of_one_wheel_add_up() -> None:
    (one,) = parse_trims(["vllm:hopper,offline", "vLLM:vllm/benchmarks/*"])
    assert one.name == "vllm"
    assert {"vllm/vllm_flash_attn/_vllm_fa2_C*.so", "vllm/vllm-rs", "vllm/benchmarks/*"} <= set(one.globs)
    with pytest.raises(UserError, match=r"unknown use of vllm: 'hoper'; did you mean 'hopper'\?"):
        parse_trims(["vllm:hoper"])
