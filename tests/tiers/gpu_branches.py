"""Lists the lines of GPU-only branches that no test executes: ``python -m tests.tiers.gpu_branches [FILE …]``.

The lines come from the sources (``tests/tiers/gpu_lines.py``). The tests that run code as on a GPU, with the stand-in
of ``tests/helpers/fake_cuda.py`` above all, or the test files given, then run under coverage.py. Half of a conditional
expression shares its line with the other half; it counts as executed when its line ran while a stand-in was active.
``--table FILE`` writes the result as a page. The exit code is 1 if a line is left without a reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.tiers.gpu_lines import Line, gpu_lines
from tests.tiers.imports import ROOT

PACKAGE = "rlhpc"
CONTEXT = "with a stand-in for CUDA"  # context of coverage.py on the fake device
# Lines that no test on a CPU can execute, by file and part of the line, with reasons.
LEFT: dict[tuple[str, str], str] = {}


def package_sources(root: Path = ROOT) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in sorted((root / PACKAGE).rglob("*.py"))
    }


def stand_in_tests(root: Path = ROOT) -> list[str]:
    """Test files that use the fake CUDA device."""
    wanted = re.compile(r"fake_cuda|on_gpu|torch\.cuda")
    files = (file for file in sorted((root / "tests").rglob("test_*.py")) if file.parent.name != "gpu")
    return [str(file.relative_to(root)) for file in files if wanted.search(file.read_text(encoding="utf-8"))]


def run_tests(files: Sequence[str]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Executed lines by file, in all tests and on the fake device. Raises CalledProcessError if a test fails."""
    from coverage import Coverage

    # Warm processes end, and write their data, after pytest.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        settings = folder / "coveragerc"
        settings.write_text(
            f"[run]\nsource = {ROOT / PACKAGE}\ndata_file = {folder / 'data'}\nparallel = true\n"
            "patch = subprocess, _exit\n"
        )
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q"]
        environ = {**os.environ, "COVERAGE_CORE": "ctrace"}
        subprocess.run([*command, *files], cwd=ROOT, check=True, env=environ)
        coverage = Coverage(config_file=str(settings))
        coverage.combine([str(folder)])
        data = coverage.get_data()
        every: dict[str, set[int]] = {}
        with_stand_in: dict[str, set[int]] = {}
        for file in data.measured_files():
            key = str(Path(file).relative_to(ROOT))
            contexts = data.contexts_by_lineno(file)
            every[key] = set(contexts)
            with_stand_in[key] = {line for line, names in contexts.items() if CONTEXT in names}
        return every, with_stand_in


def missing(lines: Iterable[Line], every: Mapping[str, set[int]], stand_in: Mapping[str, set[int]]) -> list[Line]:
    """Lines that were not executed."""
    return [x for x in lines if x.number not in (stand_in if x.shared else every).get(x.file, ())]


def reason(line: Line) -> str:
    """Reason that a line may remain unexecuted; empty if there is none."""
    return next((why for (file, part), why in LEFT.items() if line.file == file and part in line.text), "")


def page(lines: Sequence[Line], left: Sequence[Line]) -> str:
    def row(name: str, selected: Sequence[Line]) -> str:
        return f"| {name} | {len(selected)} | {len(set(selected) & set(left))} |"

    rows = [row(f"`{file}`", [x for x in lines if x.file == file]) for file in sorted({x.file for x in lines})]
    named = [f"- `{line}`: {reason(line) or 'no test executes it'}" for line in left] or ["None."]
    return "\n".join(
        [
            "# Lines of GPU-only branches",
            "",
            "Lines that run only where there is a GPU, found in the sources, and those that no test executes with the",
            "stand-in for CUDA on a machine without a GPU. Written by `make gpu-branches`.",
            "",
            "| file | lines | never executed |",
            "| --- | --- | --- |",
            *rows,
            row("all", lines),
            "",
            "## Never executed",
            "",
            *named,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.gpu_branches", description=__doc__)
    parser.add_argument("files", nargs="*", help="test files to run (those with a stand-in for CUDA)")
    parser.add_argument("--list", action="store_true", help="only print the lines")
    parser.add_argument("--table", type=Path, help="write the result as a page")
    options = parser.parse_args()
    lines = gpu_lines(package_sources())
    if options.list:
        print("\n".join(f"{line}{'  (a part)' if line.shared else ''}" for line in lines))
        return 0
    left = missing(lines, *run_tests(options.files or stand_in_tests()))
    if options.table:
        options.table.write_text(page(lines, left), encoding="utf-8")
    for line in left:
        print(f"{line}  ({reason(line) or 'no test executes it'})")
    unnamed = [line for line in left if not reason(line)]
    print(f"{len(lines)} lines of GPU-only branches: {len(left)} never executed, {len(unnamed)} without a reason")
    return bool(unnamed)


if __name__ == "__main__":
    sys.exit(main())
