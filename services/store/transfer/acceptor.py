"""Accepting connections on a thread, and serving each on a thread of its own: so many at one time and no more."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from services.store.transfer.sockets import sever

PAUSE = 0.1
"""Seconds to wait for others to end, where there are no descriptors left."""


class Acceptor:
    """Owns ``listener``, a listening socket, until ``close``. ``serve`` owns the socket that it gets; while ``most`` of
    them run, or no thread is to be had, further connections are closed at once."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], None], most: int, name: str) -> None:
        self._listener = listener
        self._serve = serve
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._run, name=f"{name}-accept", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(PAUSE)
                continue
            if not self._begin(sock):
                sock.close()

    def _begin(self, sock: socket.socket) -> bool:
        with self._lock:
            if self._closed or len(self._open) >= self._most:
                return False
            self._open.add(sock)
        try:
            threading.Thread(target=self._one, args=(sock,), name=self._name, daemon=True).start()
        except RuntimeError:  # too many threads: accepting must go on all the same
            self._over(sock)
            return False
        return True

    def _one(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        finally:
            self._over(sock)

    def _over(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)

    def close(self) -> None:
        """Listen no longer, and cut off what is being served."""
        with self._lock:
            self._closed = True
            serving = list(self._open)
        sever(self._listener)
        self._listener.close()
        for sock in serving:
            sever(sock)
