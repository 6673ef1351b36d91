"""Pieces for a target: its packages and markers, requirements of the set, refusals, and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.errors import UserError
from tests.tools.pieces.small import HERE, THIS_MACHINE, index_for_rlhpc, pip_inspect, target, wheel
from tools.pieces.closure import Closure, Offer, broken_on_target, walk
from tools.pieces.prepare import PrepareOptions, _fields, check_imports, check_set, prepare
from tools.pieces.target import Target, read_target
from tools.pieces.wheels import read_wheel, write_pieces

# A machine with PyTorch for CUDA 13, and another Python than that of the tests.
THERE = {"torch": "2.11.0+cu130", "numpy": "2.5.2", "click": "8.3.0", "pyyaml": "6.0.3", "pip": "25.3"}
FOREIGN = "3.12" if HERE != "3.12" else "3.13"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder that is pip's only source of wheels."""
    folder = tmp_path_factory.mktemp("index") / "wheels"
    index_for_rlhpc(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        yield folder


@pytest.fixture(scope="module")
def prepared(index: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """(folder, manifest, lines of checks) for a machine with torch, with vLLM trimmed."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    request = PrepareOptions(
        target(THERE, FOREIGN), left_out=("unused, Bulky_Kernels",), trims=("vllm:hopper,offline",), piece_mb=0.1
    )
    checks = prepare(request, out).checks
    return out, json.loads((out / "manifest.json").read_text()), checks


def test_the_manifest_has_no_password_of_an_index() -> None:
    """It goes to the other machine with the pieces."""
    options = PrepareOptions(Target(), bring=("extra @ https://me:Plant3d@host/extra-1-py3-none-any.whl",))
    assert _fields(options, Closure(), ())["roots"] == [
        "rlhpc[gpu]",
        "extra @ https://***@host/extra-1-py3-none-any.whl",
    ]


@pytest.mark.heavy
def test_the_target_s_own_packages_are_neither_brought_nor_changed(prepared) -> None:
    _, manifest, _ = prepared
    brought = {row["name"]: row["version"] for row in manifest["wheels"]}
    assert not brought.keys() & THERE.keys()
    assert brought["vllm"] == "0.25.0"  # the newest for this torch
    assert {"rlhpc", "megatron-core", "transformers", "submitit"} <= brought.keys()
    assert manifest["expected"]["torch"] == "2.11.0+cu130"


@pytest.mark.heavy
def test_what_only_the_target_s_python_requires_is_brought(prepared) -> None:
    assert "later" in {row["name"] for row in prepared[1]["wheels"]}


@pytest.mark.heavy
def test_a_package_left_out_is_not_brought_and_named(prepared) -> None:
    _, manifest, _ = prepared
    assert "bulky-kernels" not in {row["name"] for row in manifest["wheels"]}
    assert manifest["left_out"] == ["bulky-kernels"]


@pytest.mark.heavy
def test_what_was_trimmed_is_in_the_manifest(prepared) -> None:
    (trimmed,) = prepared[1]["trimmed"]
    assert (trimmed["name"], trimmed["files"], trimmed["unpacked_bytes"]) == ("vllm", 4, 152)


@pytest.mark.heavy
def test_imports_for_another_python_are_named_as_not_checked(prepared) -> None:
    (line,) = (line for line in prepared[2] if line.startswith("imports not checked"))
    assert f"Python {HERE}" in line
    assert f"Python {FOREIGN}" in line


@pytest.mark.heavy
def test_pieces_are_within_the_limit_and_contain_the_wheels(prepared) -> None:
    out, manifest, _ = prepared
    content = b""
    for piece in manifest["pieces"]:
        data = (out / piece["file"]).read_bytes()
        assert len(data) == piece["bytes"] <= 100_000
        assert hashlib.sha256(data).hexdigest() == piece["sha256"]
        content += data
    assert len(manifest["pieces"]) > 2
    for row in manifest["wheels"]:
        data, content = content[: row["bytes"]], content[row["bytes"] :]
        assert hashlib.sha256(data).hexdigest() == row["sha256"], row["file"]
    assert content == b""
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["manifest.json", "install_pieces.py", *(piece["file"] for piece in manifest["pieces"])]
    )


@pytest.mark.heavy
def test_a_requirement_that_no_index_has_is_named_and_nothing_is_written(index: Path, tmp_path: Path) -> None:
    wheel(tmp_path, "needy", "1.0", [f'lost-kernels>=2; python_version == "{FOREIGN}"'])
    (index / "needy-1.0-py3-none-any.whl").write_bytes((tmp_path / "needy-1.0-py3-none-any.whl").read_bytes())
    request = PrepareOptions(target(THERE, FOREIGN), extras="", bring=("needy",))
    with pytest.raises(UserError, match="lost-kernels"):
        prepare(request, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["needy-1.0-py3-none-any.whl"]


@pytest.mark.heavy
def test_a_version_of_the_target_in_the_way_is_refused_and_replaced_if_asked(index: Path, tmp_path: Path) -> None:
    request = PrepareOptions(target(THERE | {"submitit": "1.4.0"}, FOREIGN), extras="")
    with pytest.raises(UserError, match=r"submitit.*--replace"):
        prepare(request, tmp_path / "out")
    manifest = prepare(PrepareOptions(request.target, extras="", replace=("submitit",)), tmp_path / "out").manifest
    assert {row["name"]: row["version"] for row in manifest["wheels"]}["submitit"] == "1.5.4"


@pytest.mark.heavy
def test_an_older_version_is_brought_where_the_newest_ones_conflict(index: Path, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        wheel(index, "base", version)
        wheel(index, "loose", version, [f"base>={version}"])
    wheel(index, "picky", "1.0", ["base==1.0"])
    manifest = prepare(
        PrepareOptions(target(THERE, FOREIGN), extras="", bring=("picky", "loose")), tmp_path / "out"
    ).manifest
    brought = {row["name"]: row["version"] for row in manifest["wheels"]}
    assert (brought["loose"], brought["base"]) == ("1.0", "1.0")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (PrepareOptions(Target(), trims=("vllm",)), "--trim: 'vllm' names no files"),
        (PrepareOptions(Target(), bring=("a b",)), "--bring: 'a b'"),
        (PrepareOptions(Target(), piece_mb=0), "--piece-mb: 0 MB is too small"),
    ],
)
def test_options_are_refused_before_anything_is_resolved(
    tmp_path: Path, request_: PrepareOptions, message: str
) -> None:
    with pytest.raises(UserError) as error:
        prepare(request_, tmp_path / "out")
    assert str(error.value).startswith(message)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="not empty, and has no earlier set of pieces"):
        prepare(PrepareOptions(Target()), tmp_path)


def test_an_incomplete_set_is_refused_by_the_wheels_on_disk(tmp_path: Path) -> None:
    wheels = [read_wheel(wheel(tmp_path, "a", "1.0", ["b"])), read_wheel(wheel(tmp_path, "b", "1.0", ["lost>=2"]))]
    with pytest.raises(UserError, match=r"incomplete: b 1\.0 requires lost>=2"):
        check_set(wheels, ["a"], target({}), set())
    assert check_set(wheels, ["a"], target({"lost": "2.1"}), set()).needed == ["a", "b"]


def test_a_wheel_for_another_python_is_refused(tmp_path: Path) -> None:
    wheels = [read_wheel(wheel(tmp_path, "a", "1.0", tag="cp311-cp311-manylinux_2_28_x86_64"))]
    with pytest.raises(UserError, match=r"is not for Python 3\.12 on manylinux_2_39_x86_64"):
        check_set(wheels, ["a"], target({}), set())


@pytest.mark.parametrize("limit", [1, 999, 1000, 1001, 10**9])
def test_pieces_of_any_size_join_to_the_same_bytes(tmp_path: Path, limit: int) -> None:
    wheels = [read_wheel(wheel(tmp_path, name, "1.0")) for name in ("a", "b")]
    (out := tmp_path / "out").mkdir()
    pieces = write_pieces(wheels, out, limit)
    assert [piece["bytes"] for piece in pieces[:-1]] == [limit] * (len(pieces) - 1)
    joined = b"".join((out / piece["file"]).read_bytes() for piece in pieces)
    assert joined == b"".join(each.path.read_bytes() for each in wheels)


def test_an_import_stops_at_what_the_target_alone_has_and_fails_for_what_nobody_has(tmp_path: Path) -> None:
    code = {"megatron/core/__init__.py": "import absent_here\n"}
    brought = [read_wheel(wheel(tmp_path, "megatron-core", "0.16.1", files=code))]
    there = Target(HERE, THIS_MACHINE, {"absent-here": "1.0"})
    (line,) = check_imports(brought, there, tmp_path / "a")
    assert line == "import megatron.core: not checked beyond absent_here, which the target has and this machine lacks"
    with pytest.raises(UserError, match=r"megatron.core: cannot be imported .* No module named 'absent_here'"):
        check_imports(brought, Target(HERE, THIS_MACHINE), tmp_path / "b")


PACKAGES = {"torch": "2.11.0+cu130", "PyYAML": "6.0.2"}


def test_inspect_gives_packages_python_and_requirements(tmp_path: Path) -> None:
    (file := tmp_path / "target").write_text(pip_inspect(PACKAGES, {"torch": ["sympy>=1.13"]}, "3.13"))
    found = read_target(file)
    assert found.packages == {"torch": "2.11.0+cu130", "pyyaml": "6.0.2"}
    assert (found.python, found.requires["torch"]) == ("3.13", ("sympy>=1.13",))


OTHERS = ["torch==2.11.0\n", "[1, 2]", '{"a": 1}', '{"environment": {"python_version": "3.12"}}']


@pytest.mark.parametrize("text", OTHERS)
def test_another_list_is_refused_with_the_remedy(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "target").write_text(text)
    with pytest.raises(
        UserError, match=r"not the output of pip inspect: .*; run `python -m pip inspect` on the target"
    ):
        read_target(file)


def test_a_version_that_no_requirement_can_name_is_reported(tmp_path: Path) -> None:
    (file := tmp_path / "target").write_text(pip_inspect({"odd": "2024-unknown", "torch": "2.11.0"}, {}))
    found = read_target(file)
    assert (dict(found.packages), found.unusable) == ({"torch": "2.11.0"}, ("odd 2024-unknown",))


def test_tags_are_those_that_the_target_takes() -> None:
    tags = {str(tag) for tag in Target("3.12", "manylinux_2_28_x86_64").tags()}
    taken = {"cp312-cp312-manylinux_2_28_x86_64", "cp38-abi3-manylinux_2_28_x86_64", "py3-none-any"}
    taken |= {"cp312-cp312-manylinux2014_x86_64", "py3-none-manylinux1_x86_64", "cp312-cp312-linux_x86_64"}
    assert taken <= tags
    refused = {"cp311-cp311-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_31_x86_64", "cp313-abi3-linux_x86_64"}
    assert not refused & tags
    assert "cp312-cp312-manylinux_2_17_aarch64" in {str(tag) for tag in Target("3.12", "manylinux_2_28_aarch64").tags()}


def offers(**requires: list[str]) -> dict[str, Offer]:
    return {name: Offer(name, "1.0", tuple(lines)) for name, lines in requires.items()}


def test_markers_are_those_of_the_target() -> None:
    there = offers(a=['b; python_version >= "3.12"', 'c; sys_platform == "win32"'], b=[])
    assert walk(["a"], there, target({}, "3.12")).needed == ["a", "b"]
    assert walk(["a"], there, target({}, "3.11")).needed == ["a"]


def test_an_extra_brings_its_requirements_and_no_other_extra_s() -> None:
    there = offers(a=['b; extra == "gpu"', 'c; extra == "cpu"', 'a[train]; extra == "gpu"', 'd; extra == "train"'])
    there |= offers(b=[], d=[])
    closure = walk(["a[gpu]"], there, target({}))
    assert (sorted(closure.needed), closure.unmet) == (["a", "b", "d"], [])


def test_a_requirement_that_nothing_satisfies_is_named_with_who_requires_it() -> None:
    closure = walk(["a"], offers(a=["b", "c"], b=["lost>=2"], c=["old>=2"]), target({"old": "1.5"}))
    assert [str(unmet) for unmet in closure.unmet] == [
        "b 1.0 requires lost>=2, which is neither in the set nor on the target",
        "c 1.0 requires old>=2, but there is old 1.5",
    ]


def test_a_local_version_on_the_target_satisfies_its_public_one() -> None:
    closure = walk(["a"], offers(a=["torch==2.11.0"]), target({"torch": "2.11.0+cu130"}))
    assert (closure.unmet, closure.relied_on) == ([], {"torch": "2.11.0+cu130"})


def test_what_is_left_out_is_neither_needed_nor_followed() -> None:
    closure = walk(["a"], offers(a=["big"], big=["bigger"]), target({}), {"big"})
    assert (closure.needed, closure.left_out, closure.unmet) == (["a"], ["big"], [])


def test_a_root_that_is_left_out_is_brought_regardless_of_what_others_require_of_it() -> None:
    there = offers(a=["pinned==0.1.9"]) | {"pinned": Offer("pinned", "0.2.0")}
    closure = walk(["a", "pinned>=0.2"], there, target({}), {"pinned"})
    assert (closure.needed, closure.unmet) == (["a", "pinned"], [])
    assert [str(line) for line, _ in closure.required["pinned"]] == ["pinned>=0.2"]


def test_requirements_of_an_extra_of_a_package_on_the_target_are_followed() -> None:
    there = {"web": "1.0", "base": "1.0"}
    known = Target(packages=there, requires={"web": ("base>=9", 'fast; extra == "standard"')})
    closure = walk(["a"], offers(a=["web[standard]"]), known)
    assert [unmet.requirement for unmet in closure.unmet] == ["fast"]


def test_a_package_of_the_target_that_a_new_version_breaks_is_named() -> None:
    there = Target(packages={"fast": "1.0", "numba": "0.60"}, requires={"fast": ("numba<0.65",), "numba": ()})
    assert broken_on_target([Offer("numba", "0.65.0")], there) == [
        "fast on the target requires numba<0.65, and the set brings 0.65.0"
    ]
