"""The store as a process of the node sees it: :class:`StoreClient` is the real ``shared.engines.base.KVStore``."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Self

from services.store import local_messages as wire
from services.store.attach import Attached, Attaching
from services.store.local_messages import By, HeldTuple, unpack_held
from services.store.mailbox import Mailbox
from services.store.object_calls import ObjectCalls
from services.store.objects import Buffer, Data, Objects, Put
from services.store.plain import plain_namespace
from services.store.session import Session
from services.store.trace_context import carrier
from shared.blocks import Namespace
from shared.engines.base import Fetched, Held, Landing, LandingTarget, Owner, PoolClass, PoolMap, Run
from shared.errors import AgentGone
from shared.messages import Ref

__all__ = ["Buffer", "Data", "Put", "StoreClient", "plain_namespace"]

HeldList = list[HeldTuple]
MaybeHeldList = list[HeldTuple | None]


class StoreClient(ObjectCalls):
    """One connection to the node's agent. See :class:`shared.engines.base.KVStore` for what the calls mean, and
    :class:`ObjectCalls` for objects and pins.

    What a cancelled or late call was granted is given back by itself. ``close`` ends all holds; without it they end
    when this process is dead.
    """

    def __init__(self, attached: Attached, session: Session, namespace: Namespace, name: str, tenant: str = "") -> None:
        super().__init__(session, name)
        self._tenant = tenant
        self._object_api: Objects | None = None
        self._fd = attached.fd
        self._mailbox = Mailbox(attached.mailbox)
        self._posting = False
        self._agent = attached.welcome.agent
        w = attached.welcome
        self._pool = PoolMap(f"/proc/self/fd/{attached.fd}", w.offset, w.stride, w.slots, namespace.geometry)

    @classmethod
    async def connect(
        cls,
        address: str,
        namespace: Namespace,
        *,
        owner_name: str = "",
        secret: str = "",
        timeout: float = 10.0,
        tenant: str = "",
    ) -> Self:
        """Attach to the agent at ``address`` (a path, or ``@name``). Waits up to ``timeout`` seconds for one that is
        not there yet. What this client puts counts against the quota of ``tenant``. Raises AgentGone, Unauthorized,
        ConfigError (the pool has no room for another namespace)."""
        name = owner_name or f"pid {os.getpid()}"
        attaching, session = Attaching(), Session()
        try:
            attached = await asyncio.to_thread(attaching.attach, address, namespace, name, secret, timeout)
        except asyncio.CancelledError:
            attaching.give_up()
            raise
        try:
            attached.sock.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: session, sock=attached.sock)
            client = cls(attached, session, namespace, name, tenant)
        except BaseException:
            session.close()
            attached.close()
            raise
        os.close(attached.mailbox)
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give everything back. The pool's mapping elsewhere stays valid, but its slots are others' now. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if not self._session.closed:
                with contextlib.suppress(Exception):
                    await self._session.ask(wire.Bye, None, timeout=2.0)
        finally:  # also where this is cancelled: the agent frees what was held when the connection ends
            self._session.close()
            self._mailbox.close()
            os.close(fd)

    @property
    def agent(self) -> Ref:
        return self._agent

    @property
    def pool(self) -> PoolMap:
        return self._pool

    @property
    def closed(self) -> bool:
        return self._session.closed

    def watch_aborts(self, told: Callable[[str], None]) -> None:
        """See :class:`shared.engines.base.Aborting`."""
        self._session.on_abort = told

    async def stats(self) -> dict[str, float]:
        """What the agent holds now, by kind, and its slots by state."""
        answer: dict[str, float] = await self._session.ask(wire.Stats, dict[str, float])
        return answer

    # -- blocks ----------------------------------------------------------------------------------------

    async def lease(
        self, keys: Sequence[bytes], owner: Owner, pool_class: PoolClass = PoolClass.GROWTH
    ) -> list[Held | None]:
        by, packed = _by(owner, pool_class), b"".join(keys)
        answer: MaybeHeldList = await self._session.ask(
            lambda id: wire.LeaseLocal(id, packed, by), MaybeHeldList, undo=self._give_back
        )
        return [None if h is None else unpack_held(h, key) for h, key in zip(answer, keys, strict=True)]

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        packed = b"".join(keys)
        answer: list[bool] = await self._session.ask(lambda id: wire.Contains(id, packed), list[bool])
        return answer

    async def reserve(self, keys: Sequence[bytes], owner: Owner, pool_class: PoolClass, timeout: float) -> list[Held]:
        by, packed = _by(owner, pool_class), b"".join(keys)
        answer: HeldList = await self._session.ask(
            lambda id: wire.Reserve(id, packed, by, timeout), HeldList, timeout, self._give_back
        )
        return [unpack_held(h, key) for h, key in zip(answer, keys, strict=True)]

    async def allocate(self, count: int, owner: Owner, pool_class: PoolClass, timeout: float) -> list[Held]:
        by = _by(owner, pool_class)
        answer: HeldList = await self._session.ask(
            lambda id: wire.Allocate(id, count, by, timeout), HeldList, timeout, self._give_back
        )
        return [unpack_held(h) for h in answer]

    async def wait(self, key: bytes, owner: Owner, timeout: float) -> Held | None:
        by = _by(owner, PoolClass.PREFILL)
        answer: HeldTuple | None = await self._session.ask(
            lambda id: wire.Wait(id, key, by, timeout), HeldTuple | None, timeout, lambda h: self._give_back([h])
        )
        return None if answer is None else unpack_held(answer, key)

    async def commit(
        self, holds: Sequence[Held], parent: bytes, keys: Sequence[bytes], indexed: bool = False
    ) -> list[Held]:
        return await self.commit_objects(holds, parent, keys, [], indexed, chained=True)

    async def commit_objects(
        self,
        holds: Sequence[Held],
        parent: bytes,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        indexed: bool = False,
        chained: bool = False,
        release: bool = False,
    ) -> list[Held]:
        """As ``commit``, for blocks of fewer bytes than a slot, and, not ``chained``, each after ``parent`` itself.
        ``release``: the holds end with it."""
        ids, packed = [h.hold for h in holds], b"".join(keys)
        answer: HeldList = await self._session.ask(
            lambda id: wire.Commit(id, ids, parent, packed, list(lengths), indexed, chained, release=release), HeldList
        )
        return [unpack_held(h, key) for h, key in zip(answer, keys, strict=True)]

    async def post(
        self, keys: Sequence[bytes], values: Sequence[memoryview], owner: Owner, timeout: float
    ) -> list[wire.Posted]:
        """Store few bytes by way of the mailbox, which holds ``mailbox.SIZE`` of them together. At once: what is LATER
        for lack of room is for ``reserve``, and so is all where another call uses the mailbox."""
        if self.closed:
            raise AgentGone("the store agent is gone")
        if self._posting:
            return [wire.Posted.LATER] * len(keys)
        by, packed, lengths = _by(owner, PoolClass.CACHE), b"".join(keys), [len(value) for value in values]
        self._mailbox.write(values)
        self._posting = True
        answer: list[wire.Posted] = await self._session.ask(
            lambda id: wire.Put(id, packed, lengths, by), list[wire.Posted], timeout, answered=self._posted
        )
        return answer

    def _posted(self) -> None:
        """The agent has answered, perhaps to somebody who has gone: it reads the mailbox no more."""
        self._posting = False

    def give_back(self, holds: Sequence[Held]) -> None:
        """As ``release``, without waiting: whatever this client asks next finds them released."""
        self._give_back([(h.hold, h.slot, h.kind.value) for h in holds])

    async def release(self, holds: Sequence[Held]) -> None:
        """Nothing happens where the agent is gone: so are its holds."""
        ids = [h.hold for h in holds if h.hold]
        if ids and not self.closed:
            with contextlib.suppress(AgentGone):
                await self._session.ask(lambda id: wire.Release(id, ids), None)

    def _objects(self) -> Objects:
        if self._object_api is None:
            self._object_api = Objects(self, self._name, self._tenant)
        return self._object_api

    async def fetch(
        self,
        keys: Sequence[bytes],
        parent: bytes,
        sources: Sequence[str],
        owner: Owner,
        pool_class: PoolClass,
        timeout: float,
        chained: bool = True,
    ) -> list[Fetched]:
        """``chained`` False: the blocks do not follow each other, each comes after ``parent``."""
        by, packed, from_, trace = _by(owner, pool_class), b"".join(keys), list(sources), carrier()
        answer: list[wire.FetchedTuple] = await self._session.ask(
            lambda id: wire.Fetch(id, packed, parent, from_, by, timeout, chained, trace),
            list[wire.FetchedTuple],
            timeout,
            lambda late: self._give_back([f.held for f in late]),
        )
        return [_fetched(f, key) for f, key in zip(answer, keys, strict=True)]

    def _give_back(self, late: Sequence[HeldTuple | None]) -> None:
        """The answer to somebody who has gone."""
        ids = [h[0] for h in late if h is not None and h[0]]
        self._session.release(ids)

    # -- landings --------------------------------------------------------------------------------------

    async def open_landing(
        self,
        keys: Sequence[bytes],
        blocks: int,
        tokens: int,
        writer: Ref,
        owner: Owner,
        timeout: float,
        apart: frozenset[int] = frozenset(),
    ) -> Landing:
        by, packed, trace = _by(owner, PoolClass.LANDING), b"".join(keys), carrier()
        opened: wire.Opened = await self._session.ask(
            lambda id: wire.OpenLanding(id, packed, blocks, tokens, writer, by, timeout, sorted(apart), trace),
            wire.Opened,
            timeout,
            lambda late: self._session.tell(lambda id: wire.CloseLanding(id, late.token, False)),
        )
        named = [*keys, *[b""] * (blocks - len(keys))]
        have = frozenset(opened.have)
        held = [
            unpack_held(h, key if i in have else b"") for i, (h, key) in enumerate(zip(opened.held, named, strict=True))
        ]
        return Landing(opened.token, held, have)

    async def missing(self, landing: Landing, timeout: float) -> int:
        answer: int = await self._session.ask(lambda id: wire.Missing(id, landing.token, timeout), int, timeout)
        return answer

    async def owe(self, landing: Landing, blocks: Sequence[int]) -> None:
        await self._session.ask(lambda id: wire.Owe(id, landing.token, list(blocks)), None)

    async def close_landing(self, landing: Landing, keep: bool) -> list[Held]:
        if self.closed and not keep:
            return []
        answer: HeldList = await self._session.ask(
            lambda id: wire.CloseLanding(id, landing.token, keep), HeldList, undo=self._give_back
        )
        return [unpack_held(h, old.key) for h, old in zip(answer, landing.held, strict=True)] if keep else []

    async def stream(self, target: LandingTarget, runs: Sequence[Run], owner: Owner, timeout: float) -> int:
        packed = [(r.slot, r.block, r.first_layer, r.last_layer, r.first_token, r.last_token) for r in runs]
        slots, trace = list(target.slots), carrier()
        answer: int = await self._session.ask(
            lambda id: wire.Stream(id, target.agent, target.token, slots, packed, timeout, trace, target.segment),
            int,
            timeout,
        )
        return answer


def _by(owner: Owner, pool_class: PoolClass) -> By:
    return By(owner.id, owner.age, pool_class.value, owner.tenant)


def _fetched(packed: wire.FetchedTuple, key: bytes) -> Fetched:
    held = None if packed.held is None else unpack_held(packed.held, key)
    return Fetched(held, packed.transport, packed.bytes, packed.error, packed.length)
