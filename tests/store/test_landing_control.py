"""Fences and streams over a transfer engine that does on purpose what networks do (model m2_landing)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from services.store import peer_messages as peer
from services.store.directory import Board, LocalDirectory
from services.store.landing_control import LandingControl
from services.store.peers import PeerCalls
from services.store.rates import Rate
from services.store.settings import StoreSettings
from services.store.slab import AGENT, Slab
from services.store.streamer import Streamer
from services.store.transfer.base import Op, Request, Result, Status
from shared.blocks import Namespace
from shared.engines.base import LandingTarget, Owner, PoolClass
from shared.errors import Fenced, InvalidInput, MooncakeError, PeerGone
from shared.messages import Ref

NAMESPACE = Namespace(
    model="", weights="", tokenizer="", dtype="float32", layers=2, kv_heads=1, head_dim=8, block_size=16
)
ME, WRITER, TARGET = Ref("me", 1), Ref("writer", 1), Ref("target", 1)
OWNER, CONNECTION = Owner("request/1"), 7
WHOLE = (0, 2, 0, 16)


class Network:
    """A transfer engine of which each test decides what happens."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[tuple[Ref, peer.AnyCall]] = []
        self.destroyed: list[Ref] = []
        self.refused: list[int] = []
        self.requests: list[Request] = []
        self.transfers: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.drains = True

    async def call(self, target: Ref, payload: bytes, timeout: float) -> bytes:
        self.asked.append((target, peer.decode_call(payload)))
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return peer.encode(await answer() if callable(answer) else answer)

    async def destroy_endpoints(self, target: Ref) -> None:
        self.destroyed.append(target)

    def refuse_grants(self, target: Ref, grants: Iterable[int]) -> None:
        self.refused += grants

    async def drained(self, target: Ref, grants: Iterable[int], timeout: float) -> bool:
        return self.drains

    async def transfer(self, requests: Sequence[Request], timeout: float) -> list[Result]:
        self.requests += requests
        status = await self.transfers
        error = None if status is Status.COMPLETED else Fenced("refused")
        return [Result(status, "tcp", r.length if error is None else 0, error) for r in requests]


class Node:
    def __init__(self) -> None:
        self.network = Network()
        self.threads = ThreadPoolExecutor(1)
        settings = StoreSettings(growth_headroom=0.0, low_watermark=0.0, high_watermark=0.0)
        self.slab = Slab(NAMESPACE, 4, settings, LocalDirectory(Board(), "me"), self.threads)
        engine: Any = self.network
        calls = PeerCalls(engine)
        self.landings = LandingControl(ME, engine, calls, drain_timeout=0.2)
        self.streamer = Streamer(ME, engine, calls, self.landings, self.threads, Rate())

    async def landing(self, writer: Ref = WRITER) -> int:
        state, _ = await self.landings.open(self.slab, CONNECTION, [], 2, 32, writer, OWNER, 1.0, frozenset())
        return state.token

    @property
    def free(self) -> int:
        return self.slab.pool.slots.free

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(100):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    yield node
    await node.landings.close()
    await node.streamer.close()
    node.slab.close()
    node.threads.shutdown()


# -- the target --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [True, False, PeerGone("dead"), MooncakeError("whatever")], ids=str)
@pytest.mark.parametrize("receiving", [False, True])
async def test_slots_come_back_after_the_drain_or_the_destruction_and_our_receivers(
    node: Node, answer: Any, receiving: bool
) -> None:
    asked = asyncio.Event()

    async def late() -> Any:
        asked.set()
        await asyncio.sleep(0.03)
        return answer

    token = await node.landing()
    node.network.answers = [late if isinstance(answer, bool) else answer]
    receiver = ExitStack()
    if receiving:
        receiver.enter_context(node.slab.grants.write(token, WRITER, [node.slab.landings.get(token).slots[0]]))
    node.landings.fence(node.slab, CONNECTION, token)
    assert node.free == 2
    with pytest.raises(Fenced), node.slab.grants.write(token, WRITER, []):
        pass
    assert node.slab.grants.tokens(WRITER) == []
    await node.until(lambda: bool(node.network.asked))
    if receiving:
        await asyncio.sleep(0.1)
        assert node.free == 2, "reused under a receiver"
        assert node.slab.landings.quarantined == 2
        await asyncio.to_thread(receiver.close)
    await node.until(lambda: node.free == 4)
    assert node.network.destroyed == ([] if answer is True else [WRITER])  # rule: own_side
    (to, fence), *_ = node.network.asked
    assert to == WRITER and isinstance(fence, peer.Fence) and fence.token == token
    assert len(node.slab.landings) == 0 and not node.slab.pool.holds


async def test_a_dead_engines_landings_are_fenced_and_its_other_holds_freed(node: Node) -> None:
    await node.landing()
    node.slab.pool.allocate(1, CONNECTION, OWNER, PoolClass.GROWTH)
    blocked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    node.network.answers = [lambda: blocked]
    node.landings.fence_all(node.slab, CONNECTION)
    node.slab.pool.drop(CONNECTION)
    assert node.free == 2  # one never taken, one freed; two in quarantine
    assert node.slab.pool.held_by(AGENT) == 2
    blocked.set_result(True)
    await node.until(lambda: node.free == 4)


async def test_what_is_missing_waits_for_reports_of_this_attempt_and_for_our_receivers(node: Node) -> None:
    old, token = await node.landing(), await node.landing()
    node.landings.report(node.slab, old, WRITER, [(0, *WHOLE), (1, *WHOLE)])
    everything = await node.landings.missing(node.slab, CONNECTION, token, 0.01)  # rule: report_tagged
    waiting = asyncio.create_task(node.landings.missing(node.slab, CONNECTION, token, 5.0))
    node.landings.report(node.slab, token, WRITER, [(0, *WHOLE)])
    node.landings.report(node.slab, token, WRITER, [(0, *WHOLE)])
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert await node.landings.missing(node.slab, CONNECTION, token, 0.01) == everything / 2
    receiver = ExitStack()
    receiver.enter_context(node.slab.grants.write(token, WRITER, []))
    node.landings.report(node.slab, token, WRITER, [(1, *WHOLE)])
    await asyncio.sleep(0.02)
    assert not waiting.done()  # rule: join_receivers
    assert await node.landings.missing(node.slab, CONNECTION, token, 0.01) == 1
    with pytest.raises(InvalidInput):
        node.landings.keep(node.slab, CONNECTION, token)
    receiver.close()
    assert await waiting == 0
    assert len(node.landings.keep(node.slab, CONNECTION, token)) == 2
    with pytest.raises(Fenced):
        node.landings.report(node.slab, token, WRITER, [(1, *WHOLE)])


async def test_who_waits_for_a_landing_hears_that_it_is_fenced(node: Node) -> None:
    token = await node.landing()
    waiting = asyncio.create_task(node.landings.missing(node.slab, CONNECTION, token, 5.0))
    await asyncio.sleep(0.01)
    node.landings.fence(node.slab, CONNECTION, token)
    with pytest.raises(Fenced):
        await waiting


async def test_a_grant_is_live_before_its_writer_can_learn_of_it(node: Node) -> None:
    token = await node.landing()
    assert node.slab.grants.tokens(WRITER) == [token]
    assert node.slab.grants.tokens(Ref(WRITER.id, 2)) == []  # another incarnation


# -- the writer --------------------------------------------------------------------------------------------


async def test_the_source_is_held_until_the_transfer_ends_whatever_becomes_of_the_engine(node: Node) -> None:
    (held,) = node.slab.pool.allocate(1, CONNECTION, OWNER, PoolClass.PREFILL) or []
    target = LandingTarget(TARGET, 99, [3, 2])
    task = asyncio.create_task(node.streamer.stream(node.slab, target, [(held.slot, 0, *WHOLE)], 5.0))
    await node.until(lambda: bool(node.network.requests))
    task.cancel()
    node.slab.pool.drop(CONNECTION)
    assert node.free == 3 and node.slab.pool.slots[held.slot].uses == 1
    node.network.transfers.set_result(Status.COMPLETED)
    await node.until(lambda: node.free == 4)
    await node.until(lambda: bool(node.network.asked))
    (request,) = node.network.requests
    assert (request.op, request.grant, request.offset) == (Op.WRITE, 99, 3 * node.slab.memory.stride)
    to, report = node.network.asked[0]
    assert to == TARGET and isinstance(report, peer.Landed)
    assert (report.token, report.spans) == (99, [(0, *WHOLE)])


async def test_nothing_is_reported_that_did_not_complete(node: Node) -> None:
    (held,) = node.slab.pool.allocate(1, CONNECTION, OWNER, PoolClass.PREFILL) or []
    node.network.transfers.set_result(Status.FAILED)
    with pytest.raises(Fenced):
        await node.streamer.stream(node.slab, LandingTarget(TARGET, 99, [3]), [(held.slot, 0, *WHOLE)], 5.0)
    assert node.network.asked == []


async def test_a_writer_obeys_a_fence_for_good(node: Node) -> None:
    (held,) = node.slab.pool.allocate(1, CONNECTION, OWNER, PoolClass.PREFILL) or []
    node.network.drains = False
    assert not await node.streamer.fence(TARGET, 99, 0.01)
    node.network.drains = True
    assert await node.streamer.fence(TARGET, 99, 0.01)
    assert node.network.refused == [99, 99]
    for _ in range(2):
        with pytest.raises(Fenced):
            await node.streamer.stream(node.slab, LandingTarget(TARGET, 99, [3]), [(held.slot, 0, *WHOLE)], 5.0)
    assert node.network.requests == []


async def test_a_fence_of_our_own_landing_waits_for_our_own_copies_only(node: Node) -> None:
    token = await node.landing(writer=ME)
    node.landings.fence(node.slab, CONNECTION, token)
    await node.until(lambda: node.free == 4)
    assert not node.network.asked and not node.network.destroyed
