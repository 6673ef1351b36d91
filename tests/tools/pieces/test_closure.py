"""Requirements of a set on a target, by the target's markers."""

from __future__ import annotations

from tests.tools.pieces.small import target
from tools.pieces.closure import Offer, broken_on_target, walk
from tools.pieces.target import Target


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
