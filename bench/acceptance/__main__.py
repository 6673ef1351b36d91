"""Measures what works on this machine, and how fast: ``python -m bench.acceptance FOLDER`` (README.md here).

FOLDER gets a page, the results as JSON and a log. A later call with the same FOLDER, on another machine too, continues
with the parts that are left. Runs from a checkout with the rlhpc that is installed, of the same version.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("folder", nargs="?", type=Path, help="folder of the results")
    add("--part", dest="names", action="append", default=[], metavar="NAME", help="only this part, even if done")
    add("--minutes", type=float, metavar="M", help="time budget: a part starts only if its limit still fits")
    add("--size", choices=["full", "tiny"], help="size of the cases; default: full with a GPU, tiny without")
    add("--retry", action="store_true", help="run failed parts again")
    add("--strict", action="store_true", help="exit with 1 on a missed goal too")
    add("--list", action="store_true", help="list the parts with their limits; run nothing")
    add("--json", action="store_true", help="with --list: print JSON")
    add("--schema", action="store_true", help="print the JSON schema of the results; run nothing")
    return made


def prefer_installed() -> None:
    """Import rlhpc as it is installed: ``python -m`` finds the checkout first."""
    sys.path[:] = [*(path for path in sys.path if Path(path).resolve() != ROOT), str(ROOT)]


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    given = made.parse_args(arguments)
    from rlhpc import __version__
    from rlhpc.core.errors import EXIT_USER_ERROR, UserError
    from rlhpc.core.redaction import guard_output

    guard_output()
    own = re.findall(r'^__version__ = "(.+)"', (ROOT / "rlhpc" / "__init__.py").read_text(encoding="utf-8"), re.M)
    if own != [__version__]:
        print(f"acceptance: rlhpc {__version__} is installed, this checkout is of {own[0]}", file=sys.stderr)
        return EXIT_USER_ERROR
    if given.json and not given.list:
        made.error("--json applies to --list: read acceptance.json in the folder of the results")
    if given.folder is None and not given.list and not given.schema:
        made.error("no folder for the results")
    try:
        return _run(given)
    except UserError as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _run(given: argparse.Namespace) -> int:
    from bench.acceptance.driver import PARTS, Options, accept, select
    from bench.acceptance.results import json_schema

    if given.schema:
        print(json_schema(), end="")
        return 0
    if given.list:
        parts = select(PARTS, given.names)
        fields = ("name", "title", "tier", "minutes", "needs_gpu")
        if given.json:
            print(json.dumps([{field: getattr(part, field) for field in fields} for part in parts], indent=2))
        for part in [] if given.json else parts:
            gpu = "GPU only" if part.needs_gpu else ""
            print(f"{part.name:<15}{part.tier:<7}{part.minutes:>4g} min  {gpu:<10}{part.title}")
        return 0
    options = Options(tuple(given.names), given.minutes, given.size, given.retry, given.strict)
    return accept(given.folder, PARTS, options)


if __name__ == "__main__":
    prefer_installed()
    sys.exit(main())
