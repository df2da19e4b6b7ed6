"""Whole reads and writes on blocking sockets, and what tells that one has ended."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.store.transfer.sockets import block, is_over, receive_all, send_all
from shared.errors import PeerGone
from tests.examples import examples


@settings(max_examples=examples(20))
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=1500), st.lists(st.integers(1, 60_000), max_size=40))
def test_scattered_buffers_arrive_whole(sent: list[int], received: list[int]) -> None:
    data = bytes(i % 251 for i in range(sum(sent)))
    received.append(len(data) - sum(received))
    if received[-1] < 0:
        return
    left, right = socket.socketpair()
    with left, right:
        block(left)
        block(right)
        into = bytearray(len(data))

        def cut(memory: bytes | bytearray, sizes: list[int]) -> list[memoryview]:
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            return [memoryview(memory)[at : at + size] for at, size in zip(starts, sizes, strict=True)]

        thread = threading.Thread(target=send_all, args=(left, cut(data, sent)))
        thread.start()
        receive_all(right, cut(into, received))
        thread.join()
        assert into == data


def test_the_end_of_the_stream_in_the_middle() -> None:
    left, right = socket.socketpair()
    with right:
        left.sendall(b"abc")
        left.close()
        with pytest.raises(PeerGone):
            receive_all(right, [memoryview(bytearray(2)), memoryview(bytearray(2))])


@pytest.mark.parametrize("timeout", [None, 5.0, 0.0])
def test_whether_it_is_over_is_seen_without_waiting(timeout: float | None) -> None:
    left, right = socket.socketpair()
    right.settimeout(timeout)
    began = time.monotonic()
    assert not is_over(right)
    left.sendall(b"unread")
    assert not is_over(right)
    left.close()
    assert is_over(right)
    right.close()
    assert is_over(right)
    assert time.monotonic() - began < 4


def test_a_stalled_peer_is_noticed() -> None:
    left, right = socket.socketpair()
    with left, right:
        block(right, stalled=0.05)
        left.sendall(b"ab")
        with pytest.raises(BlockingIOError):
            receive_all(right, [memoryview(bytearray(4))])
        with pytest.raises(BlockingIOError):
            send_all(right, [bytes(64 << 20)])
