"""A thread that does nothing but keep this process registered, so that a busy event loop never looks dead.

The record it publishes comes from ``produce``, called in the thread: a hung engine is seen by its ``progress``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

import msgspec

from shared.errors import MooncakeError, Refused, Unavailable
from shared.redis_client import BlockingRedisLink
from shared.redis_scripts import load
from shared.registration import TTL, Record, Registration

log = logging.getLogger(__name__)

INTERVAL = 1.0
PATIENCE = 60.0
"""Seconds for the first registration: on a busy machine Redis may start later than who registers."""

WARN_EVERY = 5.0
"""Seconds between two warnings while nothing is registered yet."""


class Heartbeat:
    """Registers at once, then every ``interval`` seconds; deregisters when stopped.

    ``produce() -> Record`` must be quick and safe to call from another thread; ``beat`` is filled in here.
    ``patience``: seconds for the first registration; warnings say meanwhile what hinders it. While
    Redis is gone it keeps trying, and registers anew after a flush, by itself. It ends by itself, with ``error`` set
    and ``on_refused`` called (in the thread), when it may not go on: a later incarnation took the id
    (StaleIncarnation), or the mesh agreed on another namespace (NamespaceMismatch).
    """

    def __init__(
        self,
        metadata_url: str,
        mesh: str,
        produce: Callable[[], Record],
        *,
        interval: float = INTERVAL,
        ttl: float = TTL,
        patience: float = PATIENCE,
        on_refused: Callable[[Refused], None] | None = None,
    ) -> None:
        self._link = BlockingRedisLink(metadata_url, timeout=max(interval, 0.2))
        self._produce = produce
        self._interval = interval
        self._patience = patience
        self._warn_at = 0.0
        self._on_refused = on_refused
        self._registration = Registration(mesh, ttl)
        self._first: Future[None] = Future()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._last: Record | None = None
        self._heard = 0.0
        self.beats = 0
        self.error: MooncakeError | None = None
        self._why = "nothing was tried yet"

    @property
    def registered(self) -> bool:
        """Redis took a heartbeat and nothing has ended this one since."""
        return self._heard > 0 and self.error is None

    @property
    def silence(self) -> float:
        """Seconds since Redis last took a heartbeat; infinite before the first."""
        return time.monotonic() - self._heard if self._heard else float("inf")

    def start(self) -> None:
        """Start the thread and return; :meth:`wait` says how the first registration went."""
        self._thread.start()

    async def wait(self) -> None:
        """Until registered. Raises NamespaceMismatch, StaleIncarnation, or Unavailable after ``patience`` seconds."""
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._first)), self._patience)
        except TimeoutError as e:
            raise Unavailable(f"not registered within {self._patience:g} s: {self._why}") from e

    def stop(self, timeout: float = 3.0) -> None:
        """Deregister (when Redis answers) and end the thread. Idempotent; blocks at most ``timeout`` seconds."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    async def __aenter__(self) -> Self:
        self.start()
        try:
            await self.wait()
        except BaseException:
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)

    # -- in the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self.error is None and not self._stopping.is_set():
                started = time.monotonic()
                self._beat()
                self._stopping.wait(max(0.0, self._interval - (time.monotonic() - started)))
            self._leave()
        finally:
            self._link.close()

    def _beat(self) -> None:
        try:
            record = self._last = msgspec.structs.replace(self._produce(), beat=self.beats + 1)
            keys, args = self._registration.call(record)
            self._registration.answered(self._link.run(load("register"), keys, args), record)
        except Refused as e:
            self._refused(e)
        except Unavailable as e:
            self._why = f"Redis does not answer ({e.message})"
            self._unheard()
        except Exception as e:
            self._why = f"the record could not be made ({e!r})"
            log.exception("the heartbeat's record could not be made")
        else:
            self.beats += 1
            self._heard = time.monotonic()
            if not self._first.done():
                self._first.set_result(None)

    def _unheard(self) -> None:
        """Whoever waits for this process to come up is told why it does not."""
        if not self._heard and time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_EVERY
            log.warning("not registered yet: %s", self._why)

    def _refused(self, error: Refused) -> None:
        log.error("registration refused: %s", error)
        self.error = error
        if not self._first.done():
            self._first.set_exception(error)
        if self._on_refused is not None:
            self._on_refused(error)

    def _leave(self) -> None:
        if self._last is not None and self.error is None:
            try:
                self._link.run(load("deregister"), *self._registration.removal(self._last))
            except Unavailable as e:
                log.debug("not deregistered, the registration will expire: %s", e)
