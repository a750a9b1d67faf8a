"""Messages over a socket: whole, in order, bounded, and never waited for."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.cuda import channel as channel_module
from gpuwarden.cuda.channel import Channel
from gpuwarden.cuda.messages import Holders, Look, Request
from gpuwarden.errors import Malformed


def _pair() -> tuple[Channel[Request], Channel[Request]]:
    one, other = socket.socketpair()
    return Channel(one, Request), Channel(other, Request)


def test_messages_come_whole_and_in_order() -> None:
    here, there = _pair()
    sent = [Look(pids=tuple(range(n))) for n in range(200)]
    for message in sent:
        here.send(message)
    here.send(Holders(processes=((1, 2),)))
    assert there.receive() == [*sent, Holders(processes=((1, 2),))]
    here.close()
    assert there.receive() == []
    assert there.closed


def test_what_the_other_end_does_not_take_waits_and_then_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "UNSENT_LIMIT_BYTES", 1 << 20)
    here, there = _pair()
    big = Look(pids=tuple(range(100_000)))
    for _ in range(20):
        here.send(big)
    assert here.dropped > 0
    assert here.wants_to_write
    found = []
    for _ in range(10_000):
        here.flush()
        found += there.receive()
        if not here.wants_to_write:
            break
    assert len(found) + here.dropped == 20
    assert all(one == big for one in found)


def test_a_length_that_is_no_message_is_refused() -> None:
    one, other = socket.socketpair()
    channel: Channel[Request] = Channel(other, Request)
    one.send(struct.pack("=I", 1 << 31))
    with pytest.raises(Malformed):
        channel.receive()


@given(st.binary(max_size=200))
def test_any_bytes_give_messages_or_malformed(data: bytes) -> None:
    one, other = socket.socketpair()
    with one, other:
        channel: Channel[Request] = Channel(other, Request)
        one.sendall(struct.pack("=I", len(data)) + data)
        try:
            found = channel.receive()
        except Malformed:
            return
        assert all(isinstance(message, Holders | Look) for message in found)
