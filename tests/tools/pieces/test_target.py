"""Lists of packages as pip prints them, and the wheel tags of a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.core.errors import UserError
from tests.tools.pieces.small import pip_inspect, pip_list
from tools.pieces.target import Target, read_target

PACKAGES = {"torch": "2.11.0+cu130", "PyYAML": "6.0.2"}
FORMS = {
    "list": pip_list(PACKAGES),
    "inspect": pip_inspect(PACKAGES, {}),
    "freeze": "# a comment\ntorch==2.11.0+cu130\nPyYAML==6.0.2  # another\n",
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_pip_list_inspect_and_freeze_give_the_same_packages(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "target").write_text(text)
    assert read_target(file).packages == {"torch": "2.11.0+cu130", "pyyaml": "6.0.2"}


def test_inspect_gives_python_and_requirements(tmp_path: Path) -> None:
    (file := tmp_path / "target").write_text(pip_inspect(PACKAGES, {"torch": ["sympy>=1.13"]}, "3.13"))
    found = read_target(file)
    assert (found.python, found.requires["torch"]) == ("3.13", ("sympy>=1.13",))
    assert read_target(file, python="3.11").python == "3.11"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a==1\ntorch @ file:///build/torch.whl\n", ":2: no version in 'torch @ file:///build/torch.whl'; pass the"),
        ("-e git+https://example.org/x\n", ":1: no version in '-e git+https://example.org/x'"),
        ("[1, 2]", "entry without name and version: 1"),
        ('{"a": 1}', "JSON without `installed` and `environment`"),
        ("[{", "invalid JSON"),
        ("", "no packages in it"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused_with_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    (file := tmp_path / "target").write_text(text)
    with pytest.raises(UserError) as error:
        read_target(file)
    assert message in str(error.value)
    assert "pip list --format=json" in str(error.value)


def test_a_version_that_no_requirement_can_name_is_reported(tmp_path: Path) -> None:
    (file := tmp_path / "target").write_text(pip_list({"odd": "2024-unknown", "torch": "2.11.0"}))
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
