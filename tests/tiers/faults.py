"""Plants faults in rlhpc, one at a time, and reports which test fails: ``python -m tests.tiers.faults``.

Each fault of ``tests/tiers/planted.py`` gets its own git worktree of the current commit. The tests that its file can
reach run there up to the first failure: the nearest files first, their tests of `make check` before those of `make
test`; if all pass, those of `make test-all`. A failure counts only if the same test fails again with the fault and
passes without it.

``--whole K`` then runs all of `make test` with K of the faults, selected by ``--seed``, and lists failing tests that
``tests/tiers/imports.py`` does not reach from the file. pytest's output goes to ``build/faults``. Exit code 1: a fault
fails no test, or pytest gave no result.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.tiers.fault import Fault
from tests.tiers.imports import ROOT, read_graph
from tests.tiers.planted import FAULTS

LOGS = Path("build", "faults")
# Fails with every fault, because the file no longer has the line.
_OWN_TEST = "tests/tiers/test_faults.py"
# Tiers of one pass over the files, by the command that runs them first.
_PASSES = ({"make check": "check", "make test": "test"}, {"only make test-all": "more,long"})
_BATCH = 4  # files of a pass that run first; each next batch has three times as many
_GREEN, _NO_RESULT = "green", "no result"
_NO_TESTS = 5  # pytest's exit code when nothing was selected
_TEARDOWN_SECONDS = 60.0  # for fixtures to stop ranks and clusters after Ctrl-C
# In pytest's summary. A parameter may contain blanks.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\s\[]+(?:\[.*?\])?)?)(?: - .*)?$", re.M)
_HEADER = ("fault", "file", "breaks", "fails in", "first failing test", "seconds")
_WHOLE_HEADER = ("whole `make test` with", "failing tests", "not reached through imports")


@dataclass(frozen=True)
class Ran:
    """Result of pytest: tests that failed or could not be set up or collected, in order."""

    failed: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """``tier`` whose tests detect the fault ("green": none), first failing ``test``, seconds until then, and failures
    ``passed_over`` because they have another cause."""

    fault: Fault
    tier: str
    test: str
    seconds: float
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole:
    """Tests of `make test` that fail because of a fault, and those of them that imports do not reach."""

    fault: Fault
    failed: tuple[str, ...]
    unreached: tuple[str, ...]


@contextlib.contextmanager
def checkout(root: Path = ROOT) -> Iterator[Path]:
    """A temporary worktree of the current commit of ``root``, readable by all users of the machine, since test clusters
    have several."""
    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        place = Path(folder, "worktree")
        try:
            _git(root, "worktree", "add", "--quiet", "--detach", str(place), "HEAD").check_returncode()
            yield place
        finally:
            _git(root, "worktree", "remove", "--force", "--force", str(place))


def check_imports(place: Path) -> None:
    """Check that tests in ``place``, and processes they start, import rlhpc from there."""
    for folder in (place, Path("/")):
        code = "import rlhpc; print(rlhpc.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env=_environment(place),
            capture_output=True,
            text=True,
            check=True,
        )
        found = Path(done.stdout.strip())
        if not found.is_relative_to(place):
            raise SystemExit(f"processes started in {folder} import {found}, not the rlhpc in {place}")


def plant(fault: Fault, place: Path) -> None:
    file = place / fault.file
    file.write_text(fault.planted(file.read_text(encoding="utf-8")), encoding="utf-8")


def run_tests(place: Path, arguments: Sequence[str], log: Path) -> Ran:
    """Run pytest in a worktree and append its output to ``log``. Raises RuntimeError if it gives no result."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *arguments]
    began = time.monotonic()
    with open(log, "a+", encoding="utf-8", errors="replace") as output:
        start = output.tell()
        # In its own session, because Ctrl-C is handled here.
        process = subprocess.Popen(
            command,
            cwd=place,
            env=_environment(place),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        output.seek(start)
        _, _, summary = output.read().rpartition("short test summary info")
    failed = tuple(dict.fromkeys(_FAILED.findall(summary)))
    if not failed and code not in (0, _NO_TESTS):
        raise RuntimeError(f"pytest ended with {code}, see {log}")
    return Ran(failed, time.monotonic() - began)


def examine(fault: Fault, tests: Sequence[str], clean: Path, root: Path, log: Path) -> Outcome:
    """Plant the fault and find the first of ``tests`` that fails. ``clean``: a worktree without faults."""
    seconds, passed_over = 0.0, []
    with checkout(root) as place:
        plant(fault, place)
        for command, tiers, batch in _runs([test for test in tests if test != _OWN_TEST]):
            while files := [file for file in batch if file not in passed_over]:
                others = [f"--deselect={test}" for test in passed_over]
                ran = run_tests(place, ["-x", f"--tiers={tiers}", *others, *files], log)
                seconds += ran.seconds
                if not ran.failed:
                    break
                if _caused(ran.failed[:1], place, clean, log):
                    return Outcome(fault, command, ran.failed[0], seconds, tuple(passed_over))
                passed_over.append(ran.failed[0])
    return Outcome(fault, _GREEN, "", seconds, tuple(passed_over))


def _runs(tests: Sequence[str]) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Runs of pytest in order: command that has the tests, tiers, files."""
    for tiers_of in _PASSES:
        first, number = 0, _BATCH
        while batch := tests[first : first + number]:
            for command, tiers in tiers_of.items():
                yield command, tiers, batch
            first, number = first + number, 3 * number


def examine_whole(fault: Fault, tests: Collection[str], clean: Path, root: Path, log: Path) -> Whole:
    """Run all of `make test` with the fault. ``tests``: those that its file can reach."""
    with checkout(root) as place:
        plant(fault, place)
        failed = run_tests(place, ["--tiers=check,test", f"--ignore={_OWN_TEST}"], log).failed
        found = _caused(failed, place, clean, log)
    return Whole(fault, found, tuple(test for test in found if test.partition("::")[0] not in tests))


def _caused(failed: tuple[str, ...], place: Path, clean: Path, log: Path) -> tuple[str, ...]:
    """Tests that fail again with the fault and pass without it."""
    again = run_tests(place, failed, log).failed if failed else ()
    without = run_tests(clean, again, log).failed if again else ()
    return tuple(test for test in again if test not in without)


def table(outcomes: Sequence[Outcome], wholes: Sequence[Whole] = ()) -> str:
    """Both tables in Markdown."""
    rows = [
        (o.fault.name, f"`{o.fault.file}`", o.fault.breaks, o.tier, o.test and f"`{o.test}`", f"{o.seconds:.0f}")
        for o in outcomes
    ]
    parts = [_markdown(_HEADER, rows)]
    if wholes:
        found = [(w.fault.name, str(len(w.failed)), ", ".join(f"`{t}`" for t in w.unreached)) for w in wholes]
        parts.append(_markdown(_WHOLE_HEADER, found))
    if broken := sorted({test for outcome in outcomes for test in outcome.passed_over}):
        parts.append("Failures not caused by a fault:\n\n" + "\n".join(f"- `{t}`" for t in broken))
    return "\n\n".join(parts) + "\n"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _environment(place: Path) -> dict[str, str]:
    """Environment whose PYTHONPATH precedes the installed rlhpc in any folder."""
    path = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest and let its fixtures clean up."""
    process.send_signal(signal.SIGINT)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TEARDOWN_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=root, check=False, stdin=subprocess.DEVNULL)


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _write(file: Path | None, outcomes: Sequence[Outcome], wholes: Sequence[Whole]) -> None:
    """Write the table after each fault, for interrupted runs."""
    if file is not None:
        file.write_text(table(outcomes, wholes), encoding="utf-8")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.faults", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="these faults instead of all")
    parser.add_argument("--seed", type=int, default=0, help="seed for the faults of --whole (0)")
    parser.add_argument("--whole", type=int, default=0, metavar="K", help="run all of `make test` with K faults (0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    selected = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    (ROOT / LOGS).mkdir(parents=True, exist_ok=True)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, _interrupt)
    outcomes: list[Outcome] = []
    wholes: list[Whole] = []
    code = 130
    with contextlib.suppress(KeyboardInterrupt), checkout() as clean:
        check_imports(clean)
        _check_lines(selected, clean)
        graph = read_graph(clean)
        for fault in selected:
            tests, log = graph.tests_reached_by([fault.file]), _new_log(fault.name)
            try:
                outcomes.append(examine(fault, tests, clean, ROOT, log))
            except RuntimeError as error:
                outcomes.append(Outcome(fault, _NO_RESULT, str(error), 0.0))
            _write(options.out, outcomes, wholes)
            print(f"{fault.name}: {outcomes[-1].tier} ({outcomes[-1].seconds:.0f} s)", file=sys.stderr, flush=True)
        failures = [outcome.fault for outcome in outcomes if outcome.tier in (_GREEN, _NO_RESULT)]
        for fault in random.Random(options.seed).sample(selected, min(options.whole, len(selected))):
            tests, log = graph.tests_reached_by([fault.file]), _new_log(f"{fault.name}-whole")
            try:
                wholes.append(examine_whole(fault, tests, clean, ROOT, log))
            except RuntimeError as error:
                print(f"{fault.name}: {error}", file=sys.stderr)
                failures.append(fault)
            _write(options.out, outcomes, wholes)
        code = 1 if failures else 0
    print(table(outcomes, wholes), end="")
    return code


def _check_lines(faults: Sequence[Fault], place: Path) -> None:
    """Refuse to start if a fault can no longer be planted."""
    for fault in faults:
        try:
            fault.planted((place / fault.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from None


def _new_log(name: str) -> Path:
    log = ROOT / LOGS / f"{name}.log"
    log.unlink(missing_ok=True)
    return log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
