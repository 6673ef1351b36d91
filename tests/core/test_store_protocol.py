"""Frames and proofs as values: what is packed comes back, what is broken is refused."""

from __future__ import annotations

import copy
import random

import pytest

from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.store_client import StoreAddress
from rlhpc.core.store_protocol import (
    MAC_BYTES,
    MAX_FRAME_BYTES,
    Direction,
    FrameBuffer,
    Op,
    ProtocolError,
    as_number,
    as_seconds,
    new_secret,
    nonce,
    number,
    pack,
    proof,
    proves,
    seconds,
    unpack,
)


def both_ends(role: bytes = b"client") -> tuple[Direction, Direction]:
    """One direction of a connection, as its sender and its receiver have it."""
    words = (new_secret(), role, nonce(), nonce())
    return Direction(*words), Direction(*words)


@pytest.mark.parametrize("fields", [[], [b""], [b"key", b"value"], [b"", b"x" * 70000, b"\0\xff"]])
def test_a_frame_comes_back_however_it_is_cut(fields):
    ours, theirs = both_ends()
    sent = ours.seal(pack(Op.SET, fields)) + ours.seal(pack(Op.SET, fields))
    for step in (1, 3, len(sent)):
        buffer = FrameBuffer(copy.copy(theirs))
        found = [p for at in range(0, len(sent), step) for p in buffer.feed(sent[at : at + step])]
        assert [unpack(payload) for payload in found] == [(Op.SET, fields)] * 2


@pytest.mark.parametrize("payload", [b"", b"\x01\0", b"\x01\0\0\0\x05abc", b"\x01\xff\xff\xff\xff"])
def test_a_broken_payload_is_refused(payload):
    with pytest.raises(ProtocolError):
        unpack(payload)


def test_random_payloads_are_refused_or_understood_but_never_crash():
    source = random.Random(0)
    for _ in range(20000):
        payload = source.randbytes(source.randrange(24))
        try:
            code, fields = unpack(payload)
        except ProtocolError:
            continue
        assert pack(code, fields)[4:] == payload


@pytest.mark.parametrize("size", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_of_an_impossible_size_is_refused_by_its_head(size):
    with pytest.raises(ProtocolError):
        list(FrameBuffer(both_ends()[1]).feed(size.to_bytes(4, "big")))


def test_too_large_a_value_is_refused_before_it_is_sent(monkeypatch):
    monkeypatch.setattr("rlhpc.core.store_protocol.MAX_FRAME_BYTES", 100)
    with pytest.raises(ValueError, match="takes 100 at once"):
        pack(Op.SET, [b"x" * 101])


def test_numbers_and_spans():
    assert [as_number(number(value)) for value in (0, -5, 2**63 - 1)] == [0, -5, 2**63 - 1]
    assert as_seconds(seconds(1.5)) == 1.5
    for bad in (b"", seconds(float("nan")), seconds(float("inf")), seconds(-1.0)):
        with pytest.raises(ProtocolError):
            as_seconds(bad)


def test_a_proof_holds_for_one_secret_one_role_and_one_handshake():
    secret, ours, theirs = new_secret(), nonce(), nonce()
    given = proof(secret, b"client", ours, theirs)
    assert proves(given, secret, b"client", ours, theirs)
    assert not proves(given, new_secret(), b"client", ours, theirs)
    assert not proves(given, secret, b"server", ours, theirs)
    assert not proves(given, secret, b"client", nonce(), theirs)
    assert not proves(given, secret, b"client", theirs, ours)
    assert not proves(b"", secret, b"client", ours, theirs)


def test_an_address_hides_its_secret():
    secret = new_secret()
    address = StoreAddress.parse("node1:20001", secret.hex())
    assert address == StoreAddress("node1", 20001, secret)
    assert secret.hex() not in repr(address)
    assert repr(secret) not in repr(address)


@pytest.mark.parametrize("text", ["", "node1", "node1:", ":5", "node1:x", "node1:0", "node1:70000"])
def test_a_bad_address_is_a_user_error(text):
    with pytest.raises(UserError, match=env.RLHPC_STORE):
        StoreAddress.parse(text, new_secret().hex())


@pytest.mark.parametrize("secret", ["", "zz", "00" * 31])
def test_a_bad_secret_is_a_user_error_that_does_not_show_it(secret):
    with pytest.raises(UserError, match=f"{env.RLHPC_STORE_SECRET}: not 32 bytes in hexadecimal;"):
        StoreAddress.parse("node1:20001", secret)


@pytest.mark.parametrize("order", [[1], [0, 0], [1, 0], [0, 2]])
def test_a_frame_omitted_repeated_or_out_of_order_is_refused(order):
    ours, theirs = both_ends()
    sent = [ours.seal(pack(Op.SET, [b"key", number(n)])) for n in range(3)]
    with pytest.raises(ProtocolError, match="changed, repeated or omitted"):
        list(FrameBuffer(theirs).feed(b"".join(sent[n] for n in order)))


def test_a_changed_byte_of_a_frame_is_refused():
    ours, theirs = both_ends()
    frame = ours.seal(pack(Op.SET, [b"key", b"value"]))
    for at in range(4, len(frame)):  # in the length, it could only announce more bytes
        changed = bytearray(frame)
        changed[at] ^= 1
        with pytest.raises(ProtocolError):
            list(FrameBuffer(copy.copy(theirs)).feed(changed))


def test_a_frame_is_of_one_connection_and_direction():
    secret, theirs, ours = new_secret(), nonce(), nonce()
    mac = Direction(secret, b"client", theirs, ours).seal(b"frame")[-MAC_BYTES:]
    others = [
        (secret, b"server", theirs, ours),
        (secret, b"client", theirs, nonce()),
        (secret, b"client", nonce(), ours),
    ]
    for other in others:
        with pytest.raises(ProtocolError):
            Direction(*other).check(b"frame", mac)
