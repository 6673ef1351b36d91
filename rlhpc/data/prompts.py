"""Prompts for RL and validation, in the schema that users of other RL trainers already have.

A row's columns: ``data_source`` (a name that rewards may choose by), ``prompt`` (chat messages, or a plain text),
``reward_model`` ({"ground_truth": …}); ``extra_info`` and ``tools`` are optional, further columns are not looked at.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

import numpy as np

from rlhpc.api import Prompt
from rlhpc.config.data import DataFile, DataSection
from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import touch
from rlhpc.core.imports import import_attribute
from rlhpc.data.files import Order, Row, check_asks, check_messages, need, read_rows
from rlhpc.data.mixing import Mixture
from rlhpc.data.tokenizer import Chat, Text, Tokenizer, Tools, with_tools

_log = logging.getLogger(__name__)
_CHUNK = 4096  # texts tokenized at a time
_SAME = "give all nodes the same files, and let data.filter ask for nothing but the row"

T = TypeVar("T")


@dataclass(frozen=True)
class Readers:
    """The ranks that load the same files at the same time: each tokenizes its part, ``gather`` returns all parts."""

    index: int = 0
    count: int = 1
    gather: Callable[[Any], list[Any]] = lambda part: [part]

    def share(self, items: int) -> slice:
        return slice(items * self.index // self.count, items * (self.index + 1) // self.count)


class Prompts(Sequence[Prompt]):
    """Many prompts, their tokens in one array: as tuples of numbers they would take nine times the memory."""

    def __init__(self, rows: Sequence[Prompt], tokens: np.ndarray, ends: np.ndarray) -> None:
        """``rows`` without tokens; those of row i are ``tokens[ends[i] : ends[i + 1]]``."""
        self._rows, self.tokens, self.ends = rows, tokens, ends

    def __len__(self) -> int:
        return len(self._rows)

    def id_of(self, index: int) -> int:
        """The row of a prompt; they rise."""
        return self._rows[index].prompt_id

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row, place = self._rows[index], index % len(self)
        tokens = self.tokens[self.ends[place] : self.ends[place + 1]]
        return replace(row, tokens=tuple(tokens.tolist()))


@dataclass(frozen=True)
class PromptSet:
    """Tokenized prompts. ``dropped`` counts those left out for their length or by the user's filter.

    ``files`` are the ranges of prompts that each file has, ``names`` the sets that the files belong to ("" for none).
    With a ``mixture`` the files are passed through side by side, each in an order of its own.
    """

    prompts: Prompts
    dropped: int
    files: tuple[range, ...]
    names: tuple[str, ...] = ()
    mixture: Mixture | None = None
    shuffle: bool = True
    _orders: dict[int, Order] = field(default_factory=dict, compare=False)

    @classmethod
    def load(
        cls,
        files: Sequence[DataFile],
        section: DataSection,
        tokenizer: Tokenizer,
        where: str,
        *,
        filtered: bool = False,
        tools: Tools | None = None,
        readers: Readers | None = None,
        texts: bool = False,
    ) -> PromptSet:
        """Read and tokenize files; ``where`` is the config key that names them.

        ``filtered``: leave out what data.filter says; ``tools`` are shown in prompts that name none of their own;
        ``texts``: prompts keep what they were tokenized from.
        """
        keep = import_attribute(section.filter, "data.filter") if filtered and section.filter else None
        reader = _Reader(section, keep, texts)
        with _uncollected():
            for index, file in enumerate(files):
                reader.read(read_rows(file.path, f"{where}.{index}"))
        if not reader.total:
            raise UserError("holds no prompts", where=where, remedy="name files with at least one row")
        encode = functools.partial(tokenizer.encode_prompts, tools=tools)
        tokens = tokenize(reader.texts, encode, readers or Readers(), where, "prompts", _SAME)
        loaded = reader.finish(tokens, where)
        mixture = Mixture([file.weight or 1.0 for file in files]) if any(file.weight for file in files) else None
        for file, found in zip(files, loaded.files, strict=True):
            if mixture is not None and not found:
                raise UserError(f"{str(file.path)!r} has a weight, but no prompts are left of it", where=where)
        names = tuple(file.name or "" for file in files)
        return cls(loaded.prompts, reader.total - len(loaded.prompts), loaded.files, names, mixture, section.shuffle)

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, cursor: int, count: int, seed: int) -> tuple[list[Prompt], int]:
        """The next ``count`` prompts and the new cursor; the same for the same arguments, in every process."""
        return [self.prompts[self._index(position, seed)] for position in range(cursor, cursor + count)], cursor + count

    def first(self, count: int | None) -> list[tuple[str, Prompt]]:
        """(name, prompt) of the first ``count`` prompts of each named set, in the files' order; None: of all."""
        left: dict[str, int] = {}
        chosen = []
        for name, places in zip(self.names, self.files, strict=True):
            left.setdefault(name, len(self) if count is None else count)
            part = places[: left[name]]
            left[name] -= len(part)
            chosen += [(name, self.prompts[i]) for i in part]
        return chosen

    def numbered(self, prompt_id: int) -> Prompt:
        """The prompt of that row."""
        return self.prompts[bisect_left(range(len(self)), prompt_id, key=self.prompts.id_of)]

    @property
    def digest(self) -> str:
        """Equal where a cursor means the same: prompts, their order, the files' weights."""
        told = hashlib.blake2b(digest_size=12)
        told.update(self.prompts.tokens.tobytes())
        told.update(self.prompts.ends.tobytes())
        if self.mixture is not None:
            told.update(repr((self.mixture.parts, [len(places) for places in self.files])).encode())
        told.update(repr(self.shuffle).encode())
        return told.hexdigest()

    def _index(self, position: int, seed: int) -> int:
        if self.mixture is None:
            return self._order(-1, len(self)).take(position, 1, seed)[0][0]
        file, before = self.mixture.place(position)
        (place,), _ = self._order(file, len(self.files[file])).take(before, 1, f"{seed}:file {file}")
        return self.files[file][place]

    def _order(self, key: int, size: int) -> Order:
        if key not in self._orders:
            self._orders[key] = Order(size, self.shuffle)
        return self._orders[key]


@dataclass(frozen=True)
class _Loaded:
    prompts: Prompts
    files: tuple[range, ...]


class _Reader:
    """Rows of files on their way to prompts."""

    def __init__(self, section: DataSection, keep: Callable[[Row], Any] | None, keeps_texts: bool) -> None:
        self._section, self._keep, self._keeps_texts = section, keep, keeps_texts
        self.total = 0
        self.texts: list[Text] = []
        self._rows: list[tuple[int, str, Prompt]] = []  # file, place, prompt without tokens
        self._num_files = 0

    def read(self, rows: Iterable[tuple[str, Row]]) -> None:
        """The next file's rows; ``prompt_id`` counts them over all files, also those left out."""
        for place, row in rows:
            number, self.total = self.total, self.total + 1
            if number % _CHUNK == 0:
                touch("reading data")
            if self._keep is not None and not _asked(self._keep, row, place):
                continue
            text = _text_of(row, place, self._section.continue_final_message)
            self.texts.append(text)
            prompt = _make_prompt(number, row, place)
            if self._keeps_texts:
                prompt = replace(prompt, text=text.messages if isinstance(text, Chat) else text)
            self._rows.append((self._num_files, place, prompt))
        self._num_files += 1

    def finish(self, tokens: Sequence[np.ndarray], where: str) -> _Loaded:
        """Those that are left by their lengths."""
        section, kept, rows, sizes = self._section, [], [], [0] * self._num_files
        for (file, place, row), ids in zip(self._rows, tokens, strict=True):
            if _is_usable(len(ids), section, place):
                kept.append(ids[-section.max_prompt_tokens :])
                rows.append(row)
                sizes[file] += 1
        self._tell(where, tokens, len(kept))
        ends = np.cumsum([0, *map(len, kept)])
        bounds = list(itertools.accumulate(sizes, initial=0))
        files = tuple(range(*bound) for bound in itertools.pairwise(bounds))
        return _Loaded(Prompts(rows, np.concatenate(kept), ends), files)

    def _tell(self, where: str, tokens: Sequence[np.ndarray], kept: int) -> None:
        limits = f"data.min_prompt_tokens {self._section.min_prompt_tokens}"
        longest = f"data.max_prompt_tokens {self._section.max_prompt_tokens}"
        if not self._rows:
            raise UserError(
                f"{self._section.filter} leaves none of {self.total} prompts", where="data.filter", remedy="correct it"
            )
        if not kept:
            limit = self._section.max_prompt_tokens
            too_long = sum(len(ids) > limit for ids in tokens)
            wrong = f"longer than {longest}" if too_long else f"shorter than {limits}"
            wrong = f"all {len(tokens)} prompts are {wrong}"
            raise UserError(wrong, where=where, remedy="change the limit")
        if len(tokens) < self.total:
            left_out = self.total - len(tokens)
            _log.warning("%s: %d of %d prompts left out by %s", where, left_out, self.total, self._section.filter)
        too_long = sum(len(ids) > self._section.max_prompt_tokens for ids in tokens)
        too_short = sum(len(ids) < self._section.min_prompt_tokens for ids in tokens)
        done = "cut" if self._section.overlong_prompts == "truncate_left" else "dropped"
        if too_long:
            _log.warning("%s: %d of %d prompts %s, longer than %s", where, too_long, self.total, done, longest)
        if too_short:
            _log.warning("%s: %d of %d prompts dropped, shorter than %s", where, too_short, self.total, limits)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for cycles, which is most of the time where many small objects are made and kept."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def tokenize(
    texts: Sequence[T],
    encode: Callable[[Sequence[T]], Sequence[Sequence[int]]],
    readers: Readers,
    where: str,
    what: str,
    remedy: str,
) -> list[np.ndarray]:
    """int32 tokens of each text; every reader encodes its part, and has all. ``what`` they are, and ``remedy`` where
    the readers have not the same number of them, are for the user."""
    mine = texts[readers.share(len(texts))]
    found: list[np.ndarray] = []
    for start in range(0, len(mine), _CHUNK):
        touch("tokenizing")
        found += [np.array(ids, dtype=np.int32) for ids in encode(mine[start : start + _CHUNK])]
    flat = np.concatenate(found) if found else np.zeros(0, dtype=np.int32)
    parts = readers.gather((len(texts), flat, np.array([len(ids) for ids in found], dtype=np.int64)))
    counts = [count for count, _, _ in parts]
    if len(set(counts)) > 1:
        told = f"some ranks have found {min(counts)} {what} in it, others {max(counts)}"
        raise UserError(told, where=where, remedy=remedy)
    return [ids for _, flat, lengths in parts for ids in _cut(flat, lengths)]


def _cut(flat: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    ends = np.cumsum([0, *lengths])
    return (flat[start:stop] for start, stop in itertools.pairwise(ends))


def _asked(keep: Callable[[Row], Any], row: Row, place: str) -> bool:
    """The user's filter on a row."""
    try:
        return bool(keep(row))
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"raised {type(error).__name__}: {error}", where=f"data.filter at {place}") from error


def _text_of(row: Row, place: str, continues: bool) -> Text:
    prompt = need(row, "prompt", place)
    if not isinstance(prompt, str):
        prompt = check_messages(prompt, "prompt", place)
        if not continues:
            check_asks(prompt, "prompt", place)
    return with_tools(prompt, row, place)


def _is_usable(length: int, section: DataSection, place: str) -> bool:
    """The prompt may be used; a longer one is an error unless told otherwise. So is one without tokens."""
    if not length:
        raise UserError("the prompt has no tokens", where=place, remedy="remove the row")
    limit = section.max_prompt_tokens
    if length > limit and section.overlong_prompts == "error":
        raise UserError(
            f"the prompt has {length} tokens, data.max_prompt_tokens is {limit}",
            where=place,
            remedy="raise data.max_prompt_tokens, or set data.overlong_prompts to drop",
        )
    fits = length <= limit or section.overlong_prompts == "truncate_left"
    return fits and length >= section.min_prompt_tokens


def _make_prompt(number: int, row: Row, place: str) -> Prompt:
    """The row's prompt, without its tokens."""
    reward_model: Any = need(row, "reward_model", place)
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise UserError(
            f"column 'reward_model' is {reward_model!r:.80}", where=place, remedy='write it as {"ground_truth": …}'
        )
    extra_info = row.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        raise UserError(f"column 'extra_info' is {extra_info!r:.80}", where=place, remedy="write it as {…}")
    return Prompt(number, (), str(need(row, "data_source", place)), reward_model["ground_truth"], extra_info)
