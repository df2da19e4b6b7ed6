"""The store's object API for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

from services.store.client import StoreClient
from services.store.object_calls import PIN_TTL, Pinned, Replicas
from services.store.objects import Buffer, Data, Put
from shared.blocks import Namespace
from shared.errors import DeadlineExceeded

T = TypeVar("T")

SLACK = 5.0
"""Seconds on top of a call's own deadline until the thread behind it counts as stuck."""


class SyncStoreClient:
    """Blocking twin of :class:`StoreClient`, over a loop in a thread of its own. Thread-safe. ``close`` it."""

    def __init__(
        self,
        address: str,
        namespace: Namespace,
        *,
        owner_name: str = "",
        secret: str = "",
        timeout: float = 10.0,
        tenant: str = "",
    ) -> None:
        """Raises AgentGone, Unauthorized, ConfigError, as :meth:`StoreClient.connect`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-client", daemon=True)
        self._thread.start()
        connecting = StoreClient.connect(
            address, namespace, owner_name=owner_name, secret=secret, timeout=timeout, tenant=tenant
        )
        try:
            self._client = self._run(connecting, timeout)
        except BaseException:
            self._stop()
            raise

    def _run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Raises DeadlineExceeded where the loop itself is stuck: the call is given up then, not left to go on."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout + SLACK)
        except TimeoutError as e:
            future.cancel()
            raise DeadlineExceeded(f"the store client did not answer within {timeout + SLACK:g} s") from e

    def put(self, items: Sequence[tuple[bytes, Data]], timeout: float = 10.0) -> list[Put]:
        return self._run(self._client.put(items, timeout), timeout)

    def get(self, keys: Sequence[bytes], timeout: float = 10.0) -> list[bytes | None]:
        return self._run(self._client.get(keys, timeout), timeout)

    def get_into(self, items: Sequence[tuple[bytes, Buffer]], timeout: float = 10.0) -> list[int | None]:
        return self._run(self._client.get_into(items, timeout), timeout)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._run(self._client.contains(keys), SLACK)

    def remove(self, keys: Sequence[bytes], timeout: float = 10.0) -> list[bool]:
        return self._run(self._client.remove(keys, timeout), timeout)

    def pin(self, keys: Sequence[bytes], *, hard: bool = True, ttl: float = PIN_TTL) -> list[Pinned]:
        return self._run(self._client.pin(keys, hard=hard, ttl=ttl), SLACK)

    def unpin(self, keys: Sequence[bytes]) -> list[bool]:
        return self._run(self._client.unpin(keys), SLACK)

    def change_replica(self, keys: Sequence[bytes], copies: int, timeout: float = 10.0) -> list[Replicas]:
        return self._run(self._client.change_replica(keys, copies, timeout), timeout)

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._run(self._client.close(), SLACK)
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
