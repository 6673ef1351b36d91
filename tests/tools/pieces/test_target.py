"""Packages of a target as pip inspect prints them, and the wheel tags of a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.core.errors import UserError
from tests.tools.pieces.small import pip_inspect
from tools.pieces.target import Target, read_target

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
