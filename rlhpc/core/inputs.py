"""Reads files that users give: regular files, bounded in size; JSON of bounded depth. Every fault is a UserError."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rlhpc.core.errors import UserError
from rlhpc.core.storage import kind_of, patiently

MIB = 2**20
_NAME_BYTES = 255  # of one part of a path, on all common file systems
COPY_AGAIN = "copy or download the file again"


def read_input(path: Path, most: int = 16 * MIB, *, piped: bool = False) -> bytes:
    """Contents of a file of at most ``most`` bytes. ``piped``: also of a pipe under /dev, as of `<(command)`.

    Raises FileNotFoundError for one that is not there, for the caller to name what is near it, else UserError.
    """

    def read() -> bytes:
        with open_input(path, piped=piped) as file:
            return file.read(most + 1)

    data = patiently(read, path)
    if len(data) > most:
        raise UserError(f"is larger than {most // MIB:,} MiB", where=str(path), remedy="give the right file")
    return data


@contextmanager
def open_input(path: Path, *, piped: bool = False) -> Iterator[IO[bytes]]:
    """Context with a regular file open for reading; errors as of ``read_input``, also while it is read."""
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise _expected(error, path) from None
    except ValueError as error:  # a NUL
        raise UserError(f"cannot be read ({error})", where=str(path), remedy="correct the path") from None
    with file:
        mode = os.fstat(file.fileno()).st_mode
        pipe = piped and stat.S_ISFIFO(mode) and str(path).startswith(("/dev/", "/proc/"))
        if not stat.S_ISREG(mode) and not pipe:
            raise UserError("is not a regular file", where=str(path), remedy="give the path of a file")
        os.set_blocking(file.fileno(), True)
        try:
            yield file
        except OSError as error:
            raise _expected(error, path) from None


def read_lines(path: Path, most: int = 256 * MIB) -> Iterator[tuple[str, bytes]]:
    """Yields (``file:line``, line) for every line that is not blank; errors as of ``read_input``."""
    with open_input(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(most + 1), b""), 1):
            place = f"{path}:{number}"
            if len(line) > most:
                raise UserError(f"is longer than {most // MIB} MiB", where=place, remedy="write one object per line")
            if line.strip():
                yield place, line


def _expected(error: OSError, path: Path) -> Exception:
    """A permanent error as a UserError; one that passes, or an absent file, as it is."""
    if isinstance(error, FileNotFoundError) or kind_of(error) == "transient":
        return error
    return unreadable(error, path)


def unreadable(error: OSError, path: Path | str) -> UserError:
    """A permanent error of the file system as one that the user can fix."""
    remedy = "correct its permissions" if isinstance(error, PermissionError) else "correct the path"
    return UserError(f"cannot be read ({error.strerror or error})", where=str(path), remedy=remedy)


def parse_json(text: bytes | str, where: str, remedy: str = COPY_AGAIN) -> Any:
    """Value of a JSON document. Raises UserError for one that is broken, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError("is nested too deeply", where=where, remedy=remedy) from None
    except ValueError as error:  # bytes that are not UTF-8 and numbers of thousands of digits, too
        raise UserError(f"is not a JSON document ({str(error)[:200]})", where=where, remedy=remedy) from None


def read_json_object(path: Path, most: int = 16 * MIB, remedy: str = COPY_AGAIN) -> dict[str, Any]:
    """JSON object in a file; raises UserError, FileNotFoundError as ``read_input``."""
    value = parse_json(read_input(path, most), str(path), remedy)
    if not isinstance(value, dict):
        raise UserError("is not a JSON object", where=str(path), remedy=remedy)
    return value


def is_file_name(name: object) -> bool:
    """True if the value is a relative path that a file can have, without a way out of its folder."""
    if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute():
        return False
    try:
        parts = [part.encode() for part in Path(name).parts]
    except UnicodeEncodeError:
        return False
    return b".." not in parts and bool(parts) and all(len(part) <= _NAME_BYTES for part in parts) and len(name) < 4096
