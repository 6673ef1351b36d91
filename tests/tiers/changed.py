"""Runs the tests that a change can reach, nearest first: ``python -m tests.tiers.changed [--base REV] [FILE …]``.

Default: all differences from BASE (``main``), committed or not. Arguments after ``--`` go to pytest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.tiers.imports import ROOT, changed_files, read_graph


def main(arguments: list[str]) -> int:
    """Exit code of pytest; 0 if the change cannot reach a test."""
    own, _, rest = _split(arguments)
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.changed", description=__doc__)
    parser.add_argument("files", nargs="*", help="changed files, relative to the root of the repository")
    parser.add_argument("--base", default="main", help="the commit or branch to compare with (main)")
    parser.add_argument("--list", action="store_true", help="only print the test files")
    options = parser.parse_args(own)
    changed = options.files or changed_files(options.base)
    tests = read_graph().tests_reached_by(changed)
    print(f"{len(changed)} changed files reach {len(tests)} test files", file=sys.stderr)
    if options.list:
        print("\n".join(tests))
        return 0
    if not tests:
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "--tiers=check,test,more", *rest, *tests]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if code == 5 else code  # 5: all tests in reach are long


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    if "--" not in arguments:
        return arguments, "", []
    at = arguments.index("--")
    return arguments[:at], "--", arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
