"""A mesh of scripted instances around one real dispatcher, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, TypeVar

import numpy as np

from services.conductor.dispatch import DispatchSettings, MeshDispatcher
from services.conductor.generation import Generation, Token
from shared.blocks import chain_keys, iter_keys
from shared.memory_bus import Faults, MemoryBus
from shared.messages import Ref, Sampling
from shared.records import AgentRecord, InstanceRecord
from tests.dispatch.fakes import NAMESPACE, Fake, FakeDecode, FakePrefill

NO_FAULTS = Faults()
F = TypeVar("F", bound=Fake)


def generation(id: str, length: int = 10, max_tokens: int = 12, first: int = 5, **more: Any) -> Generation:
    tokens = np.arange(first, first + length, dtype=np.uint32)
    root = NAMESPACE.root()
    return Generation(
        id=id,
        tokens=tokens,
        root=root,
        keys=chain_keys(root, tokens, NAMESPACE.block_size),
        sampling=Sampling(max_tokens=max_tokens, seed=1),
        arrived=asyncio.get_running_loop().time(),
        **more,
    )


def put_instance(dispatcher: MeshDispatcher, record: InstanceRecord) -> None:
    """One more is registered, or an instance's record has changed."""
    dispatcher.apply(dispatcher.roster.put(record, asyncio.get_running_loop().time()))


class World:
    """A mesh of fakes around one real dispatcher."""

    def __init__(self, seed: int = 0, faults: Faults = NO_FAULTS, **settings: Any) -> None:
        self.network = MemoryBus(seed, faults)
        self.prefill_seconds = 0.05
        self.step_seconds = 0.01
        self.fakes: dict[str, Fake] = {}
        self.me = Ref("conductor", 77)
        self.bus = self.network.join("conductor")
        defaults: dict[str, Any] = {"slo_ttft_ms": 600_000, "slo_tbt_ms": 60_000}
        self.settings = DispatchSettings(**{**defaults, **settings})
        self.dispatcher: MeshDispatcher
        self._ids = itertools.count(1)

    async def open(self, prefills: int = 2, decodes: int = 2, matcher: Any = None) -> World:
        self.dispatcher = MeshDispatcher(self.settings, self.bus, self.me, matcher)
        await self.dispatcher.start()
        for i in range(prefills):
            await self.add(FakePrefill, f"p{i}")
        for i in range(decodes):
            await self.add(FakeDecode, f"d{i}")
        return self

    async def add(self, kind: type[F], id: str, incarnation: int = 1) -> F:
        fake = await kind(self, id, incarnation).start()
        self.fakes[id] = fake
        put_instance(self.dispatcher, fake.record())
        agent = fake.record().agent
        self.dispatcher.put_agent(
            AgentRecord(
                ref=agent,
                node=id,
                code=f"{id:>6}{incarnation:02d}".encode(),
                host="127.0.0.1",
                port=1,
                host_id="h",
            )
        )
        return fake

    def generation(self, **more: Any) -> Generation:
        return generation(f"r{next(self._ids)}", **more)

    def serving(self, role: str) -> Fake:
        """The prefill ("p") or decode ("d") instance of the only request in flight."""
        effort = next(iter(self.dispatcher.mesh.runs.values())).effort
        assert effort
        return self.fakes[(effort.placement.prefill if role == "p" else effort.placement.decode).id]

    async def collect(self, generation: Generation) -> list[Token]:
        return [token async for token in self.dispatcher.generate(generation)]

    async def settle(self, seconds: float = 8.0) -> None:
        """Until three more lists have surely come."""
        await asyncio.sleep(seconds)

    def nothing_held(self) -> bool:
        mesh = self.dispatcher.mesh
        ours = not mesh.runs and not len(mesh.lists) and not mesh.ledger.open_bookings
        lingering = {key for _, _, keys in mesh.ledger.lingering for key in iter_keys(keys)}
        promised = len(mesh.ledger.optimistic) - len(lingering)
        return ours and not promised and not any(fake.held for fake in self.fakes.values())

    async def close(self) -> None:
        await self.dispatcher.close()
        for fake in self.fakes.values():
            fake.kill()


def ids(tokens: list[Token]) -> list[int]:
    return [token.output.token for token in tokens]
