"""Conversions that work in one folder at once, with late views of it and without locks: results are whole."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.convert import execute
from rlhpc.convert.execute import Share, convert
from rlhpc.convert.plan import ConversionPlan
from rlhpc.convert.staging import Staging
from tests.convert import late_files
from tests.convert.helpers import Notes, plan
from tests.convert.hostile import Case, killed, make_cases, shared
from tests.helpers import failing_storage
from tests.helpers.cases import long_but

ROOT = Path(__file__).parents[2]
needs_fuse = pytest.mark.skipif(not late_files.possible(), reason="no FUSE here: these tests DID NOT RUN")
needs_seccomp = pytest.mark.skipif(
    not failing_storage.possible(), reason="no seccomp notifications here: these tests DID NOT RUN"
)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return list(make_cases(tmp_path_factory.mktemp("cases")))


@needs_fuse
@pytest.mark.workers
@pytest.mark.parametrize("way", long_but((0,), (0, 1)))
def test_jobs_with_late_views_write_one_whole_folder(tmp_path: Path, cases: list[Case], way: int) -> None:
    row = shared(cases[way], tmp_path, 2, random.Random(way))
    assert (row.results, row.equal, row.sound, row.wrong) == (2, 2, 2, [])
    assert set(row.ends) == {"0", "last 0"}


@pytest.mark.workers
@pytest.mark.parametrize("way", long_but((1,), (0, 1)))
def test_a_conversion_killed_at_random_moments_ends_the_same(tmp_path: Path, cases: list[Case], way: int) -> None:
    row = killed(cases[way], tmp_path, 6, random.Random(way))
    assert row.kills >= 6
    assert (row.equal, row.sound, row.wrong) == (row.results, row.results, [])


# --- without locks


@pytest.fixture
def made(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> ConversionPlan:
    """A plan of several files, converted on a file system whose locks do not reach other nodes."""
    monkeypatch.setattr(execute, "locked", lambda *_: contextlib.nullcontext())
    return plan(cases[1].source, "hf", piece_bytes=20_000, file_bytes=60_000)


@pytest.mark.parametrize("inner", [None, Share(0, 2), Share(1, 2)])
@pytest.mark.parametrize("outer", [None, Share(0, 2)])
def test_jobs_that_do_not_see_each_other_s_lock_do_no_harm(
    tmp_path: Path, made: ConversionPlan, cases: list[Case], outer: Share | None, inner: Share | None
) -> None:
    """The inner one works from start to end while the outer one begins."""
    target = tmp_path / "target"

    def too() -> None:
        convert(made, target, workers=1, share=inner)

    convert(made, target, workers=1, share=outer, progress=Notes(too))
    convert(made, target, workers=1)
    assert {file.name: file.read_bytes() for file in target.iterdir() if file.name != "conversion.json"} == {
        file.name: file.read_bytes() for file in cases[1].reference.iterdir() if file.name != "conversion.json"
    }
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_what_another_job_wrote_is_read_back_and_a_damaged_file_is_written_again(
    tmp_path: Path, made: ConversionPlan, cases: list[Case]
) -> None:
    target, notes = tmp_path / "target", Notes()
    convert(made, target, workers=1, share=Share(0, 1))
    file = Staging.beside(target).of(made).target / made.files[1].name
    damaged = bytearray(file.read_bytes())
    damaged[-100] ^= 4
    file.write_bytes(damaged)
    convert(made, target, workers=1, progress=notes)
    count = len(made.pieces)
    assert notes.texts == [f"{count} of {count} pieces exist already", "1 of them are damaged and are written again"]
    assert (target / file.name).read_bytes() == (cases[1].reference / file.name).read_bytes()


@pytest.mark.parametrize(
    ("job", "kept"),
    [
        ("0of2.node7-0123abcd-4711-99-89abcdef", True),
        ("0of2.node7-0123abcd-4711-99-89abcdef.ended", False),
        (None, False),
    ],
    ids=["on another machine", "ended by its own word", "killed here"],
)
def test_files_of_another_plan_go_only_if_its_jobs_have_ended(
    tmp_path: Path, made: ConversionPlan, cases: list[Case], job: str | None, kept: bool
) -> None:
    other, target = (
        plan(cases[1].source, "hf", piece_bytes=20_000, file_bytes=60_000, dtype="bfloat16"),
        tmp_path / "out",
    )
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            convert(other, target, workers=1, share=Share(0, 2), progress=Notes(lambda: os.kill(os.getpid(), 9)))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    theirs = Staging.beside(target).of(other)
    if job is not None:
        next(theirs.jobs.iterdir()).rename(theirs.jobs / job)
    convert(made, target, workers=1, share=Share(0, 2))
    assert theirs.path.exists() == kept


# --- file systems without flock

HOLDER = """
import sys
from pathlib import Path
from rlhpc.convert.staging import locked
from rlhpc.core.errors import UserError
try:
    with locked(Path(sys.argv[1]), sys.argv[2]):
        print("locked", flush=True)
        sys.stdin.read()
except UserError as error:
    print(error, flush=True)
"""


@pytest.mark.heavy
@needs_seccomp
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK], ids=errno.errorcode.get)
def test_without_flock_a_file_names_the_owner(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    storage = failing_storage.FailingStorage(folder, tmp_path)
    storage.fail(number, only=("flock",))

    @contextlib.contextmanager
    def holder(share: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with storage.running([sys.executable, "-c", HOLDER, str(folder), share], **pipes) as process:
            assert process.stdout
            yield process.stdout.readline(), process
            process.communicate()

    with holder("0") as (first, _), holder("1") as (second, killed):
        assert (first, second) == ("locked\n", "locked\n")
        for share in ("0", ""):
            with holder(share) as (third, _):
                assert "another conversion is writing here" in third
        killed.kill()
        killed.wait()
        with holder("1") as (third, _):
            assert third == "locked\n"
    with holder("") as (first, _), holder("1") as (second, _):
        assert first == "locked\n"
        assert "another conversion is writing here" in second
    assert storage.failed["flock"] >= 6
