"""Prompts for RL and validation, in the schema that verl and other RL trainers read.

Columns: ``data_source`` (a name that rewards may depend on), ``prompt`` (chat messages, or a plain text),
``reward_model`` ({"ground_truth": …}); ``extra_info`` and ``tools`` are optional, others are ignored.
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
from rlhpc.data.chat_template import Chat
from rlhpc.data.files import Mixture, Order, Row, check_messages, check_open, need, read_rows
from rlhpc.data.message_texts import Tools
from rlhpc.data.tokenizer import Tokenizer, with_tools

_log = logging.getLogger(__name__)
_CHUNK = 4096  # texts tokenized at a time
_SAME = "give all nodes the same files, and let data.filter depend on the row alone"

T = TypeVar("T")


@dataclass(frozen=True)
class Readers:
    """Ranks that load the same files together: each tokenizes its share, ``gather`` returns all shares."""

    index: int = 0
    count: int = 1
    gather: Callable[[Any], list[Any]] = lambda part: [part]

    def share(self, items: int) -> slice:
        return slice(items * self.index // self.count, items * (self.index + 1) // self.count)


@dataclass(frozen=True)
class PromptFiles:
    """Files of a prompt set; ``where`` is the config key that names them. ``filtered``: data.filter applies."""

    files: Sequence[DataFile]
    where: str
    filtered: bool = False


class Prompts(Sequence[Prompt]):
    """Prompts with all tokens in one array, which takes a ninth of the memory of tuples."""

    def __init__(self, rows: Sequence[Prompt], tokens: np.ndarray, ends: np.ndarray) -> None:
        """``rows`` are without tokens; those of row i are ``tokens[ends[i] : ends[i + 1]]``."""
        self._rows, self.tokens, self.ends = rows, tokens, ends

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> Sequence[Prompt]:
        """All prompts, without their tokens."""
        return self._rows

    def id_of(self, index: int) -> int:
        """Row number of a prompt; strictly increasing."""
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


@dataclass
class PromptSet:
    """Tokenized prompts. ``dropped`` counts those excluded by their length or the user's filter.

    ``files`` holds each file's range of prompts, ``names`` the set that each file belongs to ("" for none). With a
    ``mixture`` the files are interleaved, each in its own order.
    """

    prompts: Prompts
    dropped: int
    files: tuple[range, ...]
    names: tuple[str, ...] = ()
    mixture: Mixture | None = None
    shuffle: bool = True
    _orders: tuple[Order, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [len(self)] if self.mixture is None else [len(places) for places in self.files]
        self._orders = tuple(Order(size, shuffle=self.shuffle) for size in sizes)

    @classmethod
    def load(
        cls,
        source: PromptFiles,
        section: DataSection,
        tokenizer: Tokenizer,
        *,
        tools: Tools | None = None,
        readers: Readers | None = None,
        texts: bool = False,
    ) -> PromptSet:
        """Reads and tokenizes files. ``tools`` are shown in prompts without tools of their own; ``texts``: prompts keep
        the text or messages that they were tokenized from."""
        files, where = source.files, source.where
        keep = import_attribute(section.filter, "data.filter") if source.filtered and section.filter else None
        reader = _Reader(section, keep, keeps_texts=texts)
        with _gc_disabled():
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
                raise UserError(f"{str(file.path)!r} has a weight, but none of its prompts remain", where=where)
        names = tuple(file.name or "" for file in files)
        return cls(loaded.prompts, reader.total - len(loaded.prompts), loaded.files, names, mixture, section.shuffle)

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, cursor: int, count: int, seed: int) -> tuple[list[Prompt], int]:
        """The next ``count`` prompts and the new cursor. Determined by the arguments."""
        return [self.prompts[self._index(position, seed)] for position in range(cursor, cursor + count)], cursor + count

    def times_before(self, position: int) -> int:
        """Number of earlier occurrences of the prompt at a place of the run's order."""
        if self.mixture is None:
            return position // len(self)
        file, before = self.mixture.place(position)
        return before // len(self.files[file])

    def first(self, count: int | None) -> list[tuple[str, Prompt]]:
        """(name, prompt) of the first ``count`` prompts (None: all) of each named set, in the files' order."""
        left: dict[str, int] = {}
        selected = []
        for name, places in zip(self.names, self.files, strict=True):
            left.setdefault(name, len(self) if count is None else count)
            part = places[: left[name]]
            left[name] -= len(part)
            selected += [(name, self.prompts[i]) for i in part]
        return selected

    def numbered(self, prompt_id: int) -> Prompt:
        """The prompt of row ``prompt_id``."""
        prompt = self.prompts[bisect_left(range(len(self)), prompt_id, key=self.prompts.id_of)]
        assert prompt.prompt_id == prompt_id, f"row {prompt_id} was excluded"
        return prompt

    @property
    def digest(self) -> str:
        """Digest of the prompts, their order and the files' weights: with an equal one, cursors are interchangeable."""
        digest = hashlib.blake2b(digest_size=12)
        digest.update(self.prompts.tokens.tobytes())
        digest.update(self.prompts.ends.tobytes())
        if self.mixture is not None:
            digest.update(repr((self.mixture.parts, [len(places) for places in self.files])).encode())
        digest.update(repr(self.shuffle).encode())
        return digest.hexdigest()

    def _index(self, position: int, seed: int) -> int:
        if self.mixture is None:
            return self._orders[0].take(position, 1, seed)[0][0]
        file, before = self.mixture.place(position)
        (place,), _ = self._orders[file].take(before, 1, f"{seed}:file {file}")
        return self.files[file][place]


@dataclass(frozen=True)
class _Loaded:
    prompts: Prompts
    files: tuple[range, ...]


class _Reader:
    """Turns rows of files into prompts."""

    def __init__(self, section: DataSection, keep: Callable[[Row], Any] | None, *, keeps_texts: bool) -> None:
        self._section, self._keep, self._keeps_texts = section, keep, keeps_texts
        self.total = 0
        self.texts: list[Chat] = []
        self._rows: list[tuple[int, str, Prompt]] = []  # file, place, prompt without tokens
        self._num_files = 0

    def read(self, rows: Iterable[tuple[str, Row]]) -> None:
        """Adds the next file's rows. ``prompt_id`` numbers all rows of all files, including excluded ones."""
        for place, row in rows:
            number, self.total = self.total, self.total + 1
            if number % _CHUNK == 0:
                touch("reading data")
            if self._keep is not None and not _passes(self._keep, row, place):
                continue
            text = _text_of(row, place, continues=self._section.continue_final_message)
            self.texts.append(text)
            prompt = _make_prompt(number, row, place)
            if self._keeps_texts:
                prompt = replace(prompt, text=text.messages)
            self._rows.append((self._num_files, place, prompt))
        self._num_files += 1

    def finish(self, tokens: Sequence[np.ndarray], where: str) -> _Loaded:
        """The prompts of usable length."""
        section, usable, rows, sizes = self._section, [], [], [0] * self._num_files
        for (file, place, row), ids in zip(self._rows, tokens, strict=True):
            if _is_usable(len(ids), section, place):
                usable.append(ids[-section.max_prompt_tokens :])
                rows.append(row)
                sizes[file] += 1
        self._report(where, tokens, len(usable))
        ends = np.cumsum([0, *map(len, usable)])
        bounds = list(itertools.accumulate(sizes, initial=0))
        files = tuple(range(*bound) for bound in itertools.pairwise(bounds))
        return _Loaded(Prompts(rows, np.concatenate(usable), ends), files)

    def _report(self, where: str, tokens: Sequence[np.ndarray], usable: int) -> None:
        """Logs what was excluded; a UserError if nothing remains."""
        limits = f"data.min_prompt_tokens {self._section.min_prompt_tokens}"
        longest = f"data.max_prompt_tokens {self._section.max_prompt_tokens}"
        if not self._rows:
            raise UserError(
                f"{self._section.filter} accepts none of {self.total} prompts", where="data.filter", remedy="fix it"
            )
        if not usable:
            limit = self._section.max_prompt_tokens
            too_long = sum(len(ids) > limit for ids in tokens)
            wrong = f"longer than {longest}" if too_long else f"shorter than {limits}"
            wrong = f"all {len(tokens)} prompts are {wrong}"
            raise UserError(wrong, where=where, remedy="change the limit")
        if len(tokens) < self.total:
            excluded = self.total - len(tokens)
            _log.warning("%s: %d of %d prompts excluded by %s", where, excluded, self.total, self._section.filter)
        too_long = sum(len(ids) > self._section.max_prompt_tokens for ids in tokens)
        too_short = sum(len(ids) < self._section.min_prompt_tokens for ids in tokens)
        done = "truncated" if self._section.overlong_prompts == "truncate_left" else "dropped"
        if too_long:
            _log.warning("%s: %d of %d prompts %s, longer than %s", where, too_long, self.total, done, longest)
        if too_short:
            _log.warning("%s: %d of %d prompts dropped, shorter than %s", where, too_short, self.total, limits)


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disables garbage collection, which takes most of the time when many small objects are created."""
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
    """int32 tokens of each text. Every reader encodes its share and returns all. ``what`` names the texts, ``remedy``
    the fix in the error that is raised if readers have different numbers of texts."""
    mine = texts[readers.share(len(texts))]
    found: list[np.ndarray] = []
    for start in range(0, len(mine), _CHUNK):
        touch("tokenizing")
        found += [np.array(ids, dtype=np.int32) for ids in encode(mine[start : start + _CHUNK])]
    flat = np.concatenate(found) if found else np.zeros(0, dtype=np.int32)
    parts = readers.gather((len(texts), flat, np.array([len(ids) for ids in found], dtype=np.int64)))
    counts = [count for count, _, _ in parts]
    if len(set(counts)) > 1:
        message = f"some ranks found {min(counts)} {what} in it, others {max(counts)}"
        raise UserError(message, where=where, remedy=remedy)
    return [ids for _, flat, lengths in parts for ids in _cut(flat, lengths)]


def _cut(flat: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    ends = np.cumsum([0, *lengths])
    return (flat[start:stop] for start, stop in itertools.pairwise(ends))


def _passes(keep: Callable[[Row], Any], row: Row, place: str) -> bool:
    """Applies the user's filter to a row."""
    try:
        return bool(keep(row))
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"raised {type(error).__name__}: {error}", where=f"data.filter at {place}") from error


def _text_of(row: Row, place: str, *, continues: bool) -> Chat:
    prompt = need(row, "prompt", place)
    if not isinstance(prompt, str):
        prompt = check_messages(prompt, "prompt", place)
        if not continues:
            check_open(prompt, "prompt", place)
    return with_tools(prompt, row, place)


def _is_usable(length: int, section: DataSection, place: str) -> bool:
    """True if the prompt's length is within the limits; a UserError if data.overlong_prompts says so, or if it is 0."""
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
