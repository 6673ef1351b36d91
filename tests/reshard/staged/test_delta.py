"""Deltas of a message's bytes: bits, sizes, and what is not one."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhpc.core.errors import ReshardError
from rlhpc.reshard.staged.delta import Data, Delta, Form, Header, apply, checksum, encode

FORMS = (Form.plain, Form.compressed)
ELEMENTS = 400_000  # several chunks


def weights(seed: int, count: int = ELEMENTS) -> Data:
    """Bytes of bfloat16 weights."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    return values.bfloat16().view(torch.uint8).numpy()


def updated(old: Data, rate: float, seed: int = 0) -> Data:
    """A share of the elements moves by one or two of its last bits, as in an update with a small learning rate."""
    rng = np.random.default_rng(seed)
    new = old.copy()
    elements = new.view(np.uint16)
    where = np.flatnonzero(rng.random(len(elements)) < rate)
    elements[where] += rng.choice(np.array([1, -1, 2, -2], np.int16), len(where), p=(0.4, 0.4, 0.1, 0.1)).view(
        np.uint16
    )
    return new


def applied(delta: Delta, old: Data) -> Data:
    new = old.copy()
    apply(delta, new)
    return new


def spread(old: Data, where: list[int]) -> Data:
    """The elements there change."""
    new = old.copy()
    new.view(np.uint16)[where] ^= 1
    return new


@pytest.mark.parametrize(
    ("rate", "plain", "compressed"), [(0.007, 3.3, 1.8), (0.02, 3.3, 1.8), (0.05, 3.3, 1.8), (0.27, 3.3, 1.8)]
)
def test_a_delta_makes_the_new_bits_in_few_bytes(rate: float, plain: float, compressed: float) -> None:
    old = weights(1)
    new = updated(old, rate)
    for form, most in zip(FORMS, (plain, compressed), strict=True):
        delta = encode(new, old, form)
        assert delta is not None
        assert (applied(delta, old) == new).all()
        assert delta.changed == np.count_nonzero(new.view(np.uint16) != old.view(np.uint16))
        assert len(delta.payload) <= most * delta.changed


def test_no_change_has_no_bytes() -> None:
    for form in FORMS:
        delta = encode(weights(1), weights(1), form)
        assert delta is not None
        assert (delta.changed, len(delta.payload)) == (0, 0)
        assert (applied(delta, weights(1)) == weights(1)).all()


def test_where_all_changes_full_is_smaller() -> None:
    noise = [np.random.default_rng(seed).integers(0, 256, 2 * ELEMENTS, np.uint8) for seed in range(2)]
    for form in FORMS:
        assert encode(*noise, form) is None
    assert encode(weights(1), weights(2), Form.plain) is None


@pytest.mark.parametrize("form", FORMS)
def test_long_gaps_and_the_ends_of_a_message(form: Form) -> None:
    old = weights(1)
    for where in (
        [0],
        [ELEMENTS - 1],
        [0, ELEMENTS - 1],
        [254],
        [255],
        [256],
        [509, 510],
        [0, 256, 511, 131071, 131072],
    ):
        delta = encode(spread(old, where), old, form)
        assert delta is not None
        assert delta.changed == len(where)
        assert (applied(delta, old) == spread(old, where)).all()


def test_random_messages_are_never_larger_than_full_and_always_right() -> None:
    rng = random.Random(0)
    for seed in range(150):
        old = weights(seed, rng.choice((1, 2, 3, 7, 300, 5000)))
        new = updated(old, rng.choice((0.0, 0.001, 0.05, 0.5, 0.9, 1.0)), seed)
        for form in FORMS:
            delta = encode(new, old, form)
            if delta is not None:
                assert len(delta.payload) < len(new)
                assert (applied(delta, old) == new).all()


def test_float32_elements_between_bfloat16_ones() -> None:
    """A router in float32 begins at any even byte."""
    old = np.concatenate([weights(1, 1001), np.random.default_rng(0).random(500, np.float32).view(np.uint8)])
    new = old.copy()
    new[2002:].view(np.float32)[:] *= np.float32(1.001)
    for form in FORMS:
        delta = encode(new, old, form)
        assert delta is not None
        assert (applied(delta, old) == new).all()


def test_a_checksum_shows_each_changed_bit_and_does_not_depend_on_the_place_in_memory() -> None:
    rng = random.Random(0)
    for size in (0, 2, 8, 30, 1 << 18, (1 << 18) + 6):
        data = np.random.default_rng(size).integers(0, 256, size + 2, np.uint8)
        known = checksum(data[:size].copy())
        moved = np.concatenate([data[:2], data[:size]])
        assert checksum(moved[2:]) == known
        assert -(1 << 63) <= known < 1 << 63
        for _ in range(20 if size else 0):
            place, bit = rng.randrange(size), 1 << rng.randrange(8)
            data[place] ^= bit
            assert checksum(data[:size]) != known
            data[place] ^= bit
    zeros = np.zeros(16, np.uint8)
    swapped = [zeros.copy(), zeros.copy()]
    swapped[0][0] = swapped[1][8] = 1
    assert len({checksum(each) for each in swapped}) == 2
    assert checksum(zeros) == checksum(np.zeros(16, np.uint8))


def delta_of(form: Form) -> tuple[Delta, Data]:
    old = weights(1, 20_000)
    delta = encode(updated(old, 0.02), old, form)
    assert delta is not None
    return delta, old


def is_refused(delta: Delta, old: Data) -> bool:
    try:
        apply(delta, old.copy())
    except ReshardError as error:
        return str(error).startswith("a delta of weights is malformed: ")
    return False


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_together_is_refused(form: Form) -> None:
    delta, old = delta_of(form)
    payload = delta.payload
    for wrong in (
        replace(delta, changed=delta.changed + 1),
        replace(delta, changed=delta.changed - 1),
        replace(delta, changed=0),
        replace(delta, changed=-1),
        replace(delta, gaps=-1),
        replace(delta, gaps=len(payload) + 1),
        replace(delta, gaps=delta.gaps - 1),
        replace(delta, payload=payload[:-1]),
        replace(delta, payload=np.concatenate([payload, payload[:2]])),
        replace(delta, form=Form.full),
    ):
        assert is_refused(wrong, old)
    assert is_refused(delta, old[: len(old) // 2]), "elements beyond the message's end"
    assert not is_refused(delta, old)


def test_a_small_delta_of_very_many_elements_is_refused_without_memory_for_them() -> None:
    """Compressed zeros: one thousand times as many gaps as bytes."""
    gaps, contents = (np.frombuffer(zlib.compress(bytes(1 << 24), 9), np.uint8) for _ in range(2))
    bomb = Delta(Form.compressed, len(gaps), 1 << 24, np.concatenate([gaps, contents]))
    assert is_refused(bomb, weights(1, 1000))


def test_a_changed_bit_is_refused_or_its_checksum_shows_a_wrong_result() -> None:
    rng, shown = random.Random(0), 0
    for form in FORMS:
        delta, old = delta_of(form)
        right = applied(delta, old)
        for _ in range(150):
            payload = delta.payload.copy()
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
            wrong = replace(delta, payload=payload)
            if not is_refused(wrong, old) and (applied(wrong, old) != right).any():  # a bit of zlib may have no meaning
                assert checksum(applied(wrong, old)) != checksum(right)
                shown += 1
    assert shown > 50


def test_a_header_is_that_of_a_message_of_its_size() -> None:
    for header in (Header(Form.full, 10, 0, 0, 0, -5), Header(Form.plain, 9, 3, 3, 1 << 62, 7)):
        assert Header.decoded(header.encoded(), 10) == header
    for form, size in ((Form.full, 9), (Form.plain, 10), (Form.compressed, -1), (7, 10)):
        with pytest.raises(ReshardError, match="a message of 10 bytes of weights has the header"):
            Header.decoded(torch.tensor([form, size, 0, 0, 0, 0]), 10)
