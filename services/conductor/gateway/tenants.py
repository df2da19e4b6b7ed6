"""Who asks: the tenant of an API key. The file of keys is read again when it changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shared.api_keys import Tenant, read_key_file
from shared.errors import ConfigError, Unauthorized

CHECK_PERIOD = 1.0  # seconds between two looks at the file


class Tenants:
    """The gateway's question "who is this?". Without a file everybody is the nameless tenant."""

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._checked = clock()
        self._stamp = self._look()
        self._ring = read_key_file(path) if path else None
        self.error = ""  # why the file as it is now could not be taken over; the last good one counts

    @property
    def asked(self) -> bool:
        """Whether a request needs a key."""
        return self._ring is not None

    def identify(self, authorization: str) -> Tenant:
        """By an ``Authorization: Bearer`` header. Raises Unauthorized, without saying which part was wrong."""
        if self._ring is None:
            return Tenant()
        self._refresh()
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("no API key given; send it as 'Authorization: Bearer <key>'")
        tenant = self._ring.find(key.strip())
        if tenant is None:
            raise Unauthorized("incorrect API key provided")
        return tenant

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._checked < CHECK_PERIOD or self._path is None:
            return
        self._checked = now
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._ring, self.error = read_key_file(self._path), ""
        except ConfigError as e:
            self.error = e.message

    def _look(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path) if self._path else None
        except OSError:
            status = None
        return (status.st_mtime_ns, status.st_size, status.st_ino) if status else (0, 0, 0)
