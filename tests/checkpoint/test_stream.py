"""What is written past the page cache lies where it should, byte for byte, beside what others write."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlhpc.checkpoint.formats import stream
from rlhpc.checkpoint.formats.stream import Stream


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """One that has direct writes, as a rule, and one that may have none."""
    if request.param == "disk":
        yield tmp_path
        return
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no /dev/shm")
    folder = shared / f"stream-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def set_buffer(patch: pytest.MonkeyPatch, size: int) -> None:
    """Bytes of each of a stream's buffers."""
    patch.setattr(stream, "_BUFFER", size)


def test_parts_of_one_file_written_in_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By several streams at once, at odd places, in parts shorter and longer than a block and a buffer."""
    set_buffer(monkeypatch, 3 * 4096)
    draw = np.random.default_rng(0)
    for _ in range(20):
        content = draw.integers(0, 256, int(draw.integers(1, 90_000)), dtype=np.uint8).tobytes()
        bounds = sorted({0, len(content), *draw.integers(0, len(content), 4).tolist()})
        path = folder / "file"
        path.unlink(missing_ok=True)
        streams = [(Stream(path, truncate=False), begin, end) for begin, end in itertools.pairwise(bounds)]
        for out, begin, _ in streams:
            out.seek(begin)
        while streams:
            index = int(draw.integers(len(streams)))
            out, begin, end = streams[index]
            stop = min(end, begin + int(draw.integers(1, 20_000)))
            out.write(memoryview(content)[begin:stop])
            assert out.at == stop
            streams[index] = (out, stop, end)
            if stop == end:
                with out:
                    del streams[index]
        assert path.read_bytes() == content


def test_forked_processes_have_buffers_of_their_own(folder: Path) -> None:
    """Although they begin with those that this one has used."""
    with Stream(folder / "first", truncate=True) as out:
        out.write(b"x" * 1000)
    children = []
    for letter in (b"a", b"b"):
        child = os.fork()
        if not child:
            with Stream(folder / letter.decode(), truncate=True) as out:
                for _ in range(50):
                    out.write(letter * 100)
                    time.sleep(0.001)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    for letter in (b"a", b"b"):
        assert (folder / letter.decode()).read_bytes() == letter * 5000


def test_seeking_leaves_what_lies_between(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"." * 20_000)
    with Stream(path, truncate=False) as out:
        out.seek(5)
        out.write(b"a" * 5000)
        out.seek(5005)
        out.write(b"b")
        out.seek(12_288)
        out.write(b"c" * 4096)
    assert path.read_bytes() == b"." * 5 + b"a" * 5000 + b"b" + b"." * (12_288 - 5006) + b"c" * 4096 + b"." * 3616


def test_a_new_file_is_emptied_and_one_that_fails_is_left(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"old" * 100)
    with Stream(path, truncate=True) as out:
        out.write(b"new")
    assert path.read_bytes() == b"new"
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="the source"):
        _fail_within(path)
    assert path.read_bytes() == b"new"
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors are left open"


def _fail_within(path: Path) -> None:
    with Stream(path, truncate=False) as out:
        out.write(b"lost")
        raise OSError("the source is gone")


@pytest.mark.parametrize("buffers", [1, 2, 5])
def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch, buffers: int) -> None:
    """By the thread that writes whole buffers: with the next one, or at the end."""
    set_buffer(monkeypatch, 4096)
    threads = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        _write_to(Path("/dev/full"), buffers)
    assert threading.active_count() == threads


def _write_to(path: Path, buffers: int) -> None:
    with Stream(path, truncate=False) as out:
        for _ in range(buffers):
            out.write(b"x" * 4096)


def test_the_next_buffer_is_filled_while_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_buffer(monkeypatch, 4096)
    filled, in_time = threading.Event(), []
    write = Stream._write_out

    def slowly(self: Stream, data: memoryview, at: int) -> None:
        if not at:
            in_time.append(filled.wait(10))
        write(self, data, at)

    monkeypatch.setattr(Stream, "_write_out", slowly)
    with Stream(tmp_path / "file", truncate=True) as out:
        out.write(b"a" * 4096 + b"b" * 4000)
        filled.set()
    assert in_time == [True]
    assert (tmp_path / "file").read_bytes() == b"a" * 4096 + b"b" * 4000
