"""Rows of data files with their places, the order of a data set's rows, and the mixture of several sources."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.core.inputs import read_lines

Row = dict[str, Any]
_BATCH = 1024  # rows of a .parquet file


def read_rows(path: Path, where: str) -> Iterator[tuple[str, Row]]:
    """Yields (place, row) for every row of a .jsonl or .parquet file; ``where`` is the config key that names it.

    The place is ``file:line`` for JSONL and ``file: row n`` (from 1) for Parquet.
    """
    if not path.is_file():
        raise UserError(f"no such file {str(path)!r}", where=where, remedy="correct it")
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise UserError(f"{str(path)!r} is neither .jsonl nor .parquet", where=where, remedy="convert it to one of them")


def place_of(paths: Sequence[Path], where: str, number: int) -> str:
    """Place of a row by its number over several files, from 0."""
    rows = itertools.chain.from_iterable(read_rows(path, f"{where}.{index}") for index, path in enumerate(paths))
    return next(itertools.islice(rows, number, None))[0]


def read_column(path: Path, where: str, column: str) -> Iterator[tuple[str, Any]]:
    """Yields (place, value) for every row, None where there is none. Reads nothing else of a .parquet file."""
    if path.suffix != ".parquet":
        return ((place, row.get(column)) for place, row in read_rows(path, where))
    return _read_parquet_column(path, column)


def _read_parquet_column(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(_BATCH, columns=[column])
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                yield f"{path}: row {number}", row.get(column)
    except (ArrowException, OSError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), remedy="write the file again") from None


def need(row: Row, column: str, place: str) -> Any:
    """The row's value in ``column``; a UserError if it is missing or null."""
    if row.get(column) is None:
        state = "is null" if column in row else "is missing"
        raise UserError(
            f"column {column!r} {state}",
            where=place,
            remedy=f"add it; the row has {', '.join(repr(name) for name in row) or 'no columns'}",
        )
    return row[column]


def check_messages(value: Any, column: str, place: str) -> list[Row]:
    """``value`` as chat messages with text contents, without null fields (Parquet adds them).

    A message with ``tool_calls`` may have no content.
    """
    if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
        raise UserError(
            f"column {column!r} is {_shown(value)}",
            where=place,
            remedy='write it as [{"role": "user", "content": "…"}, …]',
        )
    messages = [{name: field for name, field in message.items() if field is not None} for message in value]
    for message in messages:
        message.setdefault("content", "")
    return messages


def check_open(messages: list[Row], column: str, place: str) -> list[Row]:
    """The messages, if they end where the model's response begins; else a UserError."""
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"column {column!r} ends with an assistant message, which leaves nothing to respond to",
            where=place,
            remedy="remove that message, or set data.continue_final_message to continue it",
        )
    return messages


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (content is None and isinstance(value.get("tool_calls"), list))


class Order:
    """Order of endless epochs over ``size`` items, each shuffled on its own; determined by seed and cursor."""

    def __init__(self, size: int, *, shuffle: bool = True) -> None:
        self._size, self._shuffle = size, shuffle
        self._epoch: tuple[int | str, int] | None = None
        self._items: list[int] = list(range(size))

    def take(self, cursor: int, count: int, seed: int | str) -> tuple[list[int], int]:
        """Indices of the next ``count`` items from ``cursor``, and the cursor after them."""
        taken = []
        for position in range(cursor, cursor + count):
            epoch, place = divmod(position, self._size)
            if self._shuffle and self._epoch != (seed, epoch):
                self._items = list(range(self._size))
                random.Random(f"{seed}:{epoch}").shuffle(self._items)
                self._epoch = (seed, epoch)
            taken.append(self._items[place])
        return taken, cursor + count


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    for place, line in read_lines(path):
        try:
            row = json.loads(line)
            if b"\\ud" in line.lower():  # a lone surrogate cannot be encoded
                json.dumps(row, ensure_ascii=False).encode()
        except RecursionError:
            raise UserError("is nested too deeply", where=place, remedy="correct or remove the line") from None
        except ValueError as error:  # invalid UTF-8 too
            raise UserError(f"broken JSON ({error})", where=place, remedy="correct or remove the line") from None
        if not isinstance(row, dict):
            raise UserError(f"is {_shown(row)}", where=place, remedy='write one {"column": value, …} per line')
        yield place, row


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), remedy="write the file again") from None
    rows = (row for batch in table.to_batches() for row in batch.to_pylist())
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_MOST = 10_000  # maximum period; weights that would need a longer one are rounded


class Mixture:
    """Endless interleaving of sources by weight; the source of a position depends on the position alone.

    Among the first n positions, each source's count differs from its share of n by less than one, and by zero at
    multiples of ``period``. Schedule of Baruah et al. 1996 ("Proportionate progress"): item j of a source with share p
    must be placed between floor(j / p) and ceil((j + 1) / p) - 1, earliest deadline first.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = _parts(weights)
        self.period = sum(self.parts)

    def place(self, position: int) -> tuple[int, int]:
        """The source at ``position``, and the number of its earlier items."""
        passes, rest = divmod(position, self.period)
        source, before = self._sequence[rest]
        return source, passes * self.parts[source] + before

    @cached_property
    def _sequence(self) -> list[tuple[int, int]]:
        """``place`` of each position in the first period."""
        period, parts = self.period, self.parts
        taken, sequence = [0] * len(parts), []
        for position in range(period):
            due = [
                (-(-(taken[i] + 1) * period // part), i)
                for i, part in enumerate(parts)
                if taken[i] * period // part <= position
            ]
            source = min(due)[1]
            sequence.append((source, taken[source]))
            taken[source] += 1
        return sequence


def _parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Positive integers in proportion to the weights, exact for decimal weights."""
    shares = [Fraction(str(weight)) for weight in weights]
    assert min(shares) > 0, "weights are positive"
    scale = lcm(*(share.denominator for share in shares))
    whole = [int(share * scale) for share in shares]
    divisor = gcd(*whole)
    if sum(whole) // divisor <= _MOST:
        return tuple(number // divisor for number in whole)
    total = sum(shares)
    return tuple(max(1, round(share * _MOST / total)) for share in shares)
