"""The prompt's blocks against the store's twin: found, fetched, awaited, computed, committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from services.prefill.blocks import PromptBlocks
from services.prefill.plan import Block
from shared.blocks import KEY, chain_keys, pack_tokens
from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.engines.memory_engine import MemoryEngine
from shared.engines.memory_store import MemoryNetwork, MemoryNode, MemoryStore
from shared.errors import PoolFull
from shared.instance.holds import Holds
from shared.instance.job import Prompt
from shared.messages import Admission, Ref, Sampling

SIZE = 16
OWNER, OTHER = Owner("r/1"), Owner("x/1")
R, N, A = Block.READY, Block.OURS, Block.AWAITED


def prompt_of(tokens: int) -> Prompt:
    array = np.arange(tokens, dtype=np.uint32)
    root = bytes(KEY)
    admission = Admission(
        gateway=Ref("g", 1),
        tokens=pack_tokens(array),
        prompt_tokens=tokens,
        root=root,
        keys=chain_keys(root, array, SIZE),
        sampling=Sampling(max_tokens=4, seed=1),
        lists=0,
    )
    return Prompt(admission, SIZE)


class Bench:
    """A node, a second one to fetch from, and the blocks of one prompt."""

    def __init__(self, tokens: int, slots: int = 16) -> None:
        network = MemoryNetwork()
        geometry = MemoryEngine(block_size=SIZE).geometry
        self.node = MemoryNode(network, "here", geometry, slots)
        self.far = MemoryNode(network, "far", geometry, slots)
        self.store = MemoryStore(self.node)
        self.prompt = prompt_of(tokens)
        self.holds = Holds(self.store, "t")
        self.blocks = PromptBlocks(self.prompt, self.store, self.holds, OWNER, timeout=0.05)

    async def put(self, numbers: Sequence[int], node: MemoryNode | None = None) -> None:
        store = MemoryStore(node or self.node)
        for i in numbers:
            held = await store.allocate(1, OTHER, PoolClass.CACHE, 0)
            await store.commit(held, self.prompt.parent(i), [self.prompt.keys[i]])
            await store.release(held)


async def test_cold() -> None:
    bench = Bench(40)
    await bench.blocks.find()
    await bench.blocks.harden()
    assert (bench.blocks.lead, await bench.blocks.reserve()) == (0, [])
    assert bench.blocks.state == [N, N, N]
    assert len(set(bench.blocks.slots)) == 3 and min(bench.blocks.slots) >= 0
    await bench.blocks.commit(range(2))
    assert all(key in bench.node.committed for key in bench.prompt.keys)
    await bench.holds.close()
    assert not bench.node.holds and len(bench.node.free) == 14


async def test_local_prefix_and_hole() -> None:
    bench = Bench(80)
    await bench.put([0, 1, 3])
    await bench.blocks.find()
    assert (bench.blocks.lead, bench.blocks.ready) == (2, [0, 1, 3])
    await bench.blocks.harden()
    await bench.blocks.reserve()
    assert bench.blocks.state == [R, R, N, R, N]
    assert bench.blocks.local_blocks == 3
    assert len(bench.node.holds) == 5  # the soft holds are gone
    await bench.holds.close()


async def test_fetched_from_another_node_as_far_as_it_goes() -> None:
    bench = Bench(80)
    await bench.put([0])
    await bench.put([0, 1, 2], bench.far)
    await bench.blocks.find()
    await bench.blocks.fetch(5, ["far"], 1.0)
    await bench.blocks.harden()
    assert bench.blocks.ready == [0, 1, 2]
    assert (bench.blocks.local_blocks, bench.blocks.fetched_blocks) == (1, 2)
    await bench.holds.close()


async def test_what_was_evicted_while_queued_is_computed() -> None:
    bench = Bench(48)
    await bench.put([0, 1, 2])
    await bench.blocks.find()
    await bench.holds.close()  # soft holds keep nothing
    bench.node.free.append(bench.node._uncommit(bench.prompt.keys[1]))
    await bench.blocks.harden()
    await bench.blocks.reserve()
    assert bench.blocks.state == [R, N, R]
    await bench.holds.close()


async def reserve_elsewhere(bench: Bench, block: int) -> Held:
    (held,) = await bench.store.reserve([bench.prompt.keys[block]], OTHER, PoolClass.PREFILL, 0)
    assert held.kind is Kind.NEW
    return held


async def test_another_writer_commits() -> None:
    bench = Bench(32)
    writer = await reserve_elsewhere(bench, 1)
    await bench.blocks.reserve()
    assert bench.blocks.state == [N, A]
    waiting = asyncio.ensure_future(bench.blocks.resolve(1))
    await bench.store.commit([writer], bench.prompt.parent(1), [bench.prompt.keys[1]])
    assert await waiting
    assert (bench.blocks.state[1], bench.blocks.slots[1]) == (R, writer.slot)
    await bench.holds.close()


async def test_another_writer_gives_up() -> None:
    bench = Bench(32)
    writer = await reserve_elsewhere(bench, 1)
    await bench.blocks.reserve()
    waiting = asyncio.ensure_future(bench.blocks.resolve(1))
    await bench.store.release([writer])
    assert not await waiting
    assert bench.blocks.state == [N, N] and bench.blocks.slots[1] >= 0
    await bench.holds.close()


async def test_another_writer_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is computed into a private slot; whoever commits first wins, both are served."""
    monkeypatch.setattr("services.prefill.blocks.WAIT_S", 0.02)
    bench = Bench(32)
    writer = await reserve_elsewhere(bench, 1)
    await bench.blocks.reserve()
    assert not await bench.blocks.resolve(1)
    assert bench.blocks.state[1] is N and bench.blocks.slots[1] != writer.slot
    await bench.store.commit([writer], bench.prompt.parent(1), [bench.prompt.keys[1]])
    await bench.blocks.commit([0, 1])
    await bench.holds.close()


async def test_no_room_is_told_and_leaves_nothing() -> None:
    bench = Bench(80, slots=4)
    with pytest.raises(PoolFull):
        bench.node.pool = bench.node.pool
        blocker = await bench.store.allocate(2, OTHER, PoolClass.GROWTH, 0)
        assert blocker
        bench.blocks.prompt = prompt_of(48)
        await PromptBlocks(prompt_of(48), bench.store, bench.holds, OWNER, 0.02).reserve()
    await bench.holds.close()
    assert len(bench.node.holds) == 2 and not bench.node.writing


async def test_spare_slot_is_taken_once() -> None:
    bench = Bench(32)
    assert await bench.blocks.spare() == await bench.blocks.spare()
    assert len(bench.holds) == 1
    await bench.holds.close()
