"""Accepting goes on, whatever becomes of single connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from services.store.transfer.acceptor import Acceptor


@contextmanager
def accepting(most: int) -> Iterator[tuple[str, int]]:
    """A server that says hello and waits for a byte."""

    def serve(sock: socket.socket) -> None:
        with closing(sock):
            sock.sendall(b"hello")
            sock.recv(1)

    listener = socket.create_server(("127.0.0.1", 0))
    address: tuple[str, int] = listener.getsockname()
    acceptor = Acceptor(listener, serve, most, "test")
    try:
        yield address
    finally:
        acceptor.close()


def said(sock: socket.socket) -> bytes:
    """What the server says at first; nothing where it hangs up."""
    return sock.recv(16)


def served(address: tuple[str, int]) -> bool:
    """In the end: a place is free only a moment after its owner has hung up."""
    until = time.monotonic() + 100
    while time.monotonic() < until:
        with socket.create_connection(address, 10) as sock:
            if said(sock) == b"hello":
                return True
        time.sleep(0.01)
    return False


def test_so_many_at_one_time() -> None:
    with accepting(2) as address:
        first, second = (socket.create_connection(address, 10) for _ in range(2))
        with first, second:
            assert said(first) == said(second) == b"hello"
            with socket.create_connection(address, 10) as third:
                assert said(third) == b""
            first.sendall(b"!")
            assert said(first) == b""
            assert served(address)


def test_without_threads_it_hangs_up_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, left = threading.Thread.start, [RuntimeError("can't start new thread")]

    def start(self: threading.Thread) -> None:
        if left and self.name == "test":
            raise left.pop()
        plain(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with accepting(2) as address:
        with socket.create_connection(address, 10) as first:
            assert said(first) == b""
        assert served(address)


def test_the_end_cuts_off_what_is_served() -> None:
    with accepting(2) as address:
        served = socket.create_connection(address, 10)
        assert said(served) == b"hello"
    with served:
        assert said(served) == b""
        with pytest.raises(ConnectionError):
            socket.create_connection(address, 10)
