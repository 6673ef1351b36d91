"""The finder of lines that only a GPU reaches."""

from __future__ import annotations

import textwrap

import pytest

from tests.tiers import gpu_branches
from tests.tiers.gpu_branches import missing, package_sources
from tests.tiers.gpu_lines import Line, gpu_lines


def found(source: str) -> list[str]:
    """The texts of the lines, those of which a part counts in brackets."""
    lines = gpu_lines({"rlhpc/a.py": textwrap.dedent(source)})
    return [f"({line.text})" if line.shared else line.text for line in lines]


@pytest.mark.parametrize(
    ("condition", "branch"),
    [
        ("torch.cuda.is_available()", "yes()"),
        ("not torch.cuda.is_available()", "no()"),
        ("x.is_cuda and other", "yes()"),
        ("other or x.is_cuda", None),
        ("not x.is_cuda or other", "no()"),
        ("self._on_gpu", "yes()"),
        ('x.device.type == "cuda"', "yes()"),
        ('x.device.type != "cuda"', "no()"),
        ('device.type == "cpu"', "no()"),
        ("other", None),
    ],
)
def test_branches_of_conditions(condition: str, branch: str | None) -> None:
    lines = [line for line in found(f"if {condition}:\n    yes()\nelse:\n    no()") if not line.startswith("(")]
    assert lines == ([branch] if branch else [])


def test_what_follows_an_early_return_of_cpus() -> None:
    source = """
    def f(x):
        if not x.is_cuda:
            return 1
        second()
        if other:
            third()
    """
    assert found(source) == ["second()", "if other:", "third()"]


def test_names_that_are_true_only_on_a_gpu() -> None:
    source = """
    class A:
        def __init__(self, x):
            self._lasting = x.device.type == "cuda"
            self._event = make(x) if x.is_cuda else None

        def f(self, x):
            fused = x.is_cuda and fits(x)
            if fused:
                first()
            if self._event is not None:
                second()
            if not self._lasting:
                never()
    """
    assert found(source) == [
        "(self._event = make(x) if x.is_cuda else None)",
        "(fused = x.is_cuda and fits(x))",
        "first()",
        "second()",
    ]


def test_parts_of_a_line() -> None:
    assert found('backend = "nccl" if on_gpu else "gloo"') == ['(backend = "nccl" if on_gpu else "gloo")']
    assert found("x = y.to(a, pin_memory=y.is_cuda)") == []
    assert found("torch.cuda.empty_cache()") == ["(torch.cuda.empty_cache())"]
    assert found("n = torch.cuda.device_count()") == []


def test_functions_that_only_gpu_code_refers_to() -> None:
    source = """
    def kernel(x):
        return helper(x)

    def helper(x):
        return x

    def shared(x):
        return x

    def call(x):
        if x.is_cuda:
            return kernel(shared(x))
        return shared(x)
    """
    assert found(source) == ["return helper(x)", "return x", "return kernel(shared(x))"]


def test_a_part_counts_only_where_a_gpu_was_reported() -> None:
    whole, part = Line("a.py", 3, "f()", False), Line("a.py", 4, "x = f() if on_gpu else 0", True)
    assert missing([whole, part], {"a.py": {3, 4}}, {"a.py": set()}) == [part]
    assert missing([whole, part], {"a.py": {4}}, {"a.py": {4}}) == [whole]
    assert missing([whole, part], {}, {}) == [whole, part]


@pytest.fixture(scope="module")
def package_lines() -> list[Line]:
    return gpu_lines(package_sources())


@pytest.mark.heavy
def test_the_package_s_branches_are_found(package_lines: list[Line]) -> None:
    files = {line.file for line in package_lines}
    assert {
        "rlhpc/parallel/groups.py",
        "rlhpc/rollout/vllm_gpu.py",
        "rlhpc/backends/kernels/packed_attention.py",
    } <= files
    texts = {line.text for line in package_lines}
    assert "output = flash(query, key, value, *bounds, softmax_scale=scores.scale, causal=True, **options)" in texts
    assert '"cpu:gloo,cuda:nccl" if on_gpu else "gloo",' in texts


def test_every_line_that_may_be_left_is_there_with_a_reason(package_lines: list[Line]) -> None:
    for (file, part), why in gpu_branches.LEFT.items():
        assert why
        assert any(line.file == file and part in line.text for line in package_lines), (file, part)
