"""Errors of file systems are waited for where that helps, and what is written stays whole."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core import storage
from rlhpc.core.attempts import begin, folders, read_attempt
from rlhpc.core.exits import classify
from rlhpc.core.files import LineFile, names_in, rename, write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.storage import Patience, StorageError, exists, kind_of, patiently
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.supervise.job_store import StoreServer
from tests.helpers.waiting import until


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    storage.use(Patience(60.0))
    yield
    storage.use(Patience())


def failing(times: int, number: int) -> Callable[[], str]:
    """An action that fails so often, then succeeds."""
    left = [number] * times

    def act() -> str:
        if left:
            raise OSError(left.pop(), "failed", "/some/file")
        return "done"

    return act


class Broken:
    """A function of ``os`` whose first calls report ``number``, before or after they have taken effect."""

    def __init__(self, name: str, number: int, *, times: int = 1, took_effect: bool = False) -> None:
        self._real, self._number, self._left, self._took_effect = getattr(os, name), number, times, took_effect
        self.calls = 0

    @classmethod
    def put(cls, patch: pytest.MonkeyPatch, name: str, number: int, **more: Any) -> Broken:
        """In place of the function, until the patch is undone."""
        broken = cls(name, number, **more)
        patch.setattr(os, name, broken)
        return broken

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > self._left:
            return self._real(*args, **kwargs)
        if self._took_effect:
            self._real(*args, **kwargs)
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, "transient"),
        (errno.ESTALE, "transient"),
        (errno.EROFS, "transient"),
        (errno.ETIMEDOUT, "transient"),
        (errno.ESHUTDOWN, "transient"),
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "full"),
        (errno.EACCES, "permanent"),
        (errno.ENOENT, "permanent"),
        (errno.ENOTDIR, "permanent"),
        (errno.ELOOP, "permanent"),
        (errno.ENAMETOOLONG, "permanent"),
    ],
)
def test_kinds_of_errors(number: int, kind: str) -> None:
    assert kind_of(OSError(number, "")) == kind


def test_a_transient_error_is_waited_for_with_a_line_at_each_end(capfd: pytest.CaptureFixture) -> None:
    before = storage.waits()
    assert patiently(failing(2, errno.ESTALE)) == "done"
    assert storage.waits() != before
    first, last = capfd.readouterr().err.splitlines()
    assert first == "rlhpc: /some/file: failed; waiting up to 60 s for the file system"
    assert re.fullmatch(r"rlhpc: /some/file: continuing after \d+\.\d s", last)


@pytest.mark.heavy
def test_pauses_grow() -> None:
    tries = 0

    def act() -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EIO, "")

    with pytest.raises(StorageError):
        patiently(act, patience=Patience(1.0))
    assert tries <= 6, "ten pauses of the first one's length have room in the second"


def test_an_error_that_lasts_longer_than_the_limit_is_no_matter_of_the_user() -> None:
    with pytest.raises(StorageError, match=r"\[Errno 108\] failed: '/some/file'") as caught:
        patiently(failing(10**6, errno.ESHUTDOWN), patience=Patience(0.3))
    assert classify(caught.value) == "error", "though ESHUTDOWN is a BrokenPipeError, as a lost peer raises it"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC])
def test_what_waiting_does_not_help_is_raised_at_once(number: int) -> None:
    act = failing(1, number)
    with pytest.raises(OSError, match="failed") as caught:
        patiently(act)
    assert caught.value.errno == number
    assert not isinstance(caught.value, StorageError)


def test_space_is_waited_for_by_those_that_may_until_they_give_up() -> None:
    assert patiently(failing(1, errno.ENOSPC), patience=Patience(full_seconds=float("inf"))) == "done"
    ended = threading.Event()
    threading.Timer(0.3, ended.set).start()
    with pytest.raises(OSError, match="failed"):
        patiently(failing(10**6, errno.ENOSPC), patience=Patience(full_seconds=float("inf"), give_up=ended.is_set))


def test_no_answer_is_not_taken_for_absence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    Broken.put(monkeypatch, "stat", errno.EIO)
    assert exists(tmp_path / "step-1")
    Broken.put(monkeypatch, "listdir", errno.ESTALE)
    assert names_in(tmp_path, "step-*") == ["step-1"]


def lossy_fsync(monkeypatch: pytest.MonkeyPatch, kept: int = 0) -> None:
    """The first fsync fails, and the kernel drops all beyond ``kept`` bytes: a second one would find nothing to do."""
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            os.ftruncate(descriptor, kept)
            raise OSError(errno.EIO, "lost")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_data_that_a_failed_fsync_lost_is_written_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lossy_fsync(monkeypatch)
    write_atomic(tmp_path / "verdict.json", "the verdict")
    assert (tmp_path / "verdict.json").read_text() == "the verdict"
    assert names_in(tmp_path) == ["verdict.json"], "no temporary file is left"


def test_lines_whose_writing_failed_are_there_whole_and_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("before\n")
    lines = LineFile(file)
    lines.append("one\n")
    real, calls = os.pwrite, []

    def torn(descriptor: int, data: bytes, place: int) -> int:
        calls.append(place)
        if len(calls) > 1:
            return real(descriptor, data, place)
        real(descriptor, data[:3], place)
        raise OSError(errno.ETIMEDOUT, "timed out")

    monkeypatch.setattr(os, "pwrite", torn)
    lines.append("second\n")
    lossy_fsync(monkeypatch, file.stat().st_size)
    lines.append("third\n")
    lines.append("fourth\n")
    assert file.read_text().splitlines() == ["before", "one", "second", "third", "fourth"]


def test_a_rename_that_took_effect_and_reported_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "writing").mkdir()
    replace = Broken.put(monkeypatch, "replace", errno.EIO, took_effect=True)
    rename(tmp_path / "writing", tmp_path / "step-1")
    assert (names_in(tmp_path), replace.calls) == (["step-1"], 2)


def test_a_rename_of_what_another_has_taken_away_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another folder has the name: not a rename that took effect."""
    (tmp_path / "writing").mkdir()
    (tmp_path / "step-1").mkdir()

    def taken(source: Path, target: Path) -> None:
        Path(source).rename(tmp_path / "trash")
        monkeypatch.undo()
        raise OSError(errno.EIO, "failed")

    monkeypatch.setattr(os, "replace", taken)
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "writing", tmp_path / "step-1")


@pytest.mark.parametrize("took_effect", [False, True])
def test_an_attempt_begins_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, took_effect: bool) -> None:
    run = RunFolder(tmp_path)
    known = {"job_id": "7", "restart_count": 0, "nodes": ("a",), "world_size": 1, "saved_step": -1}
    begin(run, **known)
    for name in ("mkdir", "rename", "replace"):
        Broken.put(monkeypatch, name, errno.ESTALE, took_effect=took_effect)
    second = begin(run, **known)
    assert names_in(run.checkpoints) == [f".writing-{second.path.name}"], "earlier ranks are fenced off"
    assert read_attempt(second) is not None
    assert folders(run)[-1].number == second.number
    assert all(folder.is_dir() for folder in (second.exits, second.logs, second.heartbeats))


def test_a_wait_for_storage_is_progress(tmp_path: Path) -> None:
    server = StoreServer.open(host="127.0.0.1")
    address = StoreAddress("127.0.0.1", server.port, server.secret)
    beat = Heartbeat(tmp_path, 0, hang_timeout_seconds=1.0, store=address).start()

    def phase_and_touches() -> tuple[str, int]:
        known = json.loads((server.beats.record(0) or (b"{}", 0.0))[0])
        return known.get("phase", ""), known.get("touches", 0)

    try:
        patiently(failing(3, errno.EIO))
        until(lambda: phase_and_touches()[0] == "waiting for storage")
        assert phase_and_touches()[1] >= 1
    finally:
        beat.stop()
        server.close()
