"""Publisher, mirrors, lookup and sweeper against a real server: followed, found, healed after every loss."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from shared.blocks import KEY, split_keys
from shared.embedded import RedisServer
from shared.errors import Unavailable
from shared.index import Layout, code
from shared.index.lookup import lookup
from shared.index.mirroring import IndexMirror
from shared.index.prefix import PrefixIndex
from shared.index.publishing import IndexPublisher
from shared.index.sweeping import Sweeper
from shared.messages import Ref
from shared.metadata import Metadata
from shared.records import AgentRecord
from shared.redis_client import RedisLink

A, B = code(1), code(2**64 - 1)


def keys(n: int, seed: int = 0) -> list[bytes]:
    return split_keys(np.random.default_rng(seed).bytes(KEY * n))


async def until(holds: Callable[[], bool], timeout: float = 100.0) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.fixture
async def link(redis_server: RedisServer) -> AsyncIterator[RedisLink]:
    link = RedisLink(redis_server.url)
    await link.client.flushall()
    yield link
    await link.close()


async def test_published_followed_matched_and_looked_up(redis_server: RedisServer, link: RedisLink) -> None:
    url, blocks, fork = redis_server.url, keys(3000), keys(10, 1)
    async with (
        IndexPublisher(url, "m", A) as a,
        IndexPublisher(url, "m", B) as b,
        IndexMirror(url, "m") as mirror,
    ):
        mirror.living({A, B})
        a.committed(b"", blocks)
        b.committed(b"x" * KEY, blocks[:100])
        b.committed(blocks[99], fork, tier=1)
        await a.flushed()
        await b.flushed()
        assert await lookup(link, "m", [blocks[5], b"?" * KEY, fork[0]]) == [{A: 0, B: 0}, {}, {B: 1}]
        await until(lambda: mirror.match(b"".join(blocks)) == {A: 3000, B: 100})
        await until(lambda: mirror.match(b"".join(blocks[:100] + fork)) == {A: 100, B: 110})
        lengths = mirror.prefix.match(chain := b"".join(blocks[:100] + fork))
        assert mirror.prefix.fast(chain, lengths)[mirror.columns[B]] == 100
        assert mirror.dram(chain) == {B: 100} and mirror.dram(b"".join(blocks)) == {}
        assert mirror.synced and a.synced and mirror.summary()["blocks"] == {A.hex(): 3000, B.hex(): 110}
        a.evicted(blocks[:0:-1])
        a.evicted([blocks[7]])
        await a.flushed()
        await until(lambda: mirror.match(b"".join(blocks)) == {A: 1, B: 100})
        mirror.living({B})
        assert mirror.match(b"".join(blocks)) == {B: 100}
        assert mirror.summary()["differences"] == {"new": 16} or not mirror.summary()["differences"]


async def test_most_blocks_come_in_runs_not_loose(redis_server: RedisServer, link: RedisLink) -> None:
    async with IndexMirror(redis_server.url, "m") as mirror, IndexPublisher(redis_server.url, "m", A) as a:
        await until(lambda: mirror.synced)
        blocks, parent = keys(2000), b""
        for at in range(0, 2000, 50):
            a.committed(parent, blocks[at : at + 50])
            parent = blocks[at + 49]
            await asyncio.sleep(0)
        mirror.living({A})
        await a.flushed()
        await until(lambda: mirror.summary()["blocks"] == {A.hex(): 2000})
        assert mirror.prefix.places.loose < 200


async def test_b4_a_late_mirror_reads_what_is_there(redis_server: RedisServer, link: RedisLink) -> None:
    blocks = keys(10_000)
    async with IndexPublisher(redis_server.url, "m", A) as a:
        a.committed(b"", blocks)
        await a.flushed()
        await link.client.delete(*Layout("m").stream)
        async with IndexMirror(redis_server.url, "m") as mirror:
            mirror.living({A})
            await until(lambda: mirror.match(b"".join(blocks)) == {A: 10_000})
            a.committed(blocks[-1], more := keys(5, 2))
            await until(lambda: mirror.match(b"".join(blocks + more)) == {A: 10_005})


async def test_flushed_and_restarted_redis_is_filled_again(link: RedisLink) -> None:
    blocks = keys(500)
    with RedisServer() as server:
        async with IndexPublisher(server.url, "m", A) as a, IndexMirror(server.url, "m") as mirror:
            mirror.living({A})
            a.committed(b"", blocks)
            await until(lambda: mirror.match(b"".join(blocks)) == {A: 500} and mirror.synced)
            other = RedisLink(server.url)
            await other.client.flushall()
            await until(lambda: a.republished > 0 and a.synced)
            assert len([found for found in await lookup(other, "m", blocks) if found == {A: 0}]) == 500
            assert mirror.match(b"".join(blocks)) == {A: 500}
            server.kill()
            a.committed(blocks[-1], more := keys(20, 3))
            a.evicted(blocks[:2])
            with pytest.raises(Unavailable):
                await a.flushed(0.05)
            with pytest.raises(Unavailable):
                await lookup(other, "m", blocks)
            server.start()
            await a.flushed(20)
            await until(lambda: a.synced and mirror.synced)
            await until(lambda: mirror.match(b"".join(blocks)) == {})
            await until(lambda: mirror.match(b"".join([*blocks[2:], *more])) == {A: 518})
            found = await lookup(other, "m", [*blocks, *more])
            assert [bool(places) for places in found] == [False] * 2 + [True] * 518
            await other.close()


async def test_garbage_in_its_keys_heals(redis_server: RedisServer, link: RedisLink) -> None:
    """What tells the state of a shard is overwritten with junk, and junk stands beside it: mirrors go on."""
    blocks, names = keys(400), Layout("m")
    async with IndexPublisher(redis_server.url, "m", A) as a, IndexMirror(redis_server.url, "m") as mirror:
        mirror.living({A})
        a.committed(b"", blocks)
        await until(lambda: mirror.match(b"".join(blocks)) == {A: 400} and mirror.synced)
        for hashes in (names.taken, names.told):
            for name in hashes:
                await link.client.hset(name, mapping={b"garbage": b"\xff\x00zzz", b"": b"", A: b"short"})
        for name in names.stream:
            await link.client.xadd(name, {b"junk": b"junk"})
        for name in names.blocks:  # two whose lengths are together those of a key
            await link.client.hset(name, mapping={b"": b"", b"1234567": b"\xff", b"123456789": A + b"\x00"})
        await until(lambda: a.republished > 0 and a.synced)
        a.committed(blocks[-1], more := keys(50, 4))
        await until(lambda: mirror.match(b"".join(blocks + more)) == {A: 450} and mirror.synced)


@pytest.mark.parametrize("what", ["store", "store_loose", "remove"])
async def test_a_change_that_breaks_is_read_anew(
    redis_server: RedisServer, link: RedisLink, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A bug half-way through an entry, or through reading a shard anew: what it left is not what is matched."""
    blocks, broken = keys(900), list[str]()
    change = getattr(PrefixIndex, what)

    def once(self: PrefixIndex, *args: Any) -> Any:
        answer = change(self, *args)
        if not broken:
            broken.append(what)
            raise MemoryError
        return answer

    async with IndexPublisher(redis_server.url, "m", A) as a:
        a.committed(b"", blocks)
        await a.flushed()
        if what == "store_loose":
            monkeypatch.setattr(PrefixIndex, what, once)
        async with IndexMirror(redis_server.url, "m") as mirror:
            mirror.living({A})
            await until(lambda: mirror.match(b"".join(blocks)) == {A: 900} and mirror.synced)
            monkeypatch.setattr(PrefixIndex, what, once)
            a.committed(blocks[-1], more := keys(300, 5))
            a.evicted(blocks[:1])
            await until(lambda: mirror.match(b"".join(blocks[1:] + more)) == {A: 1199} and mirror.synced)
            assert broken == [what] and mirror.summary()["differences"]["broken"] == 1
            assert mirror.match(b"".join(blocks)) == {}


async def test_a_full_queue_while_redis_is_gone_is_dropped_and_published_anew() -> None:
    with RedisServer() as server:
        async with IndexPublisher(server.url, "m", A) as a:
            a.committed(b"", keys(10))
            await a.flushed()
            server.kill()
            for seed in range(1, 9):
                a.committed(b"", keys(10_000, seed))
                await asyncio.sleep(0)
            assert a._core._queued <= 1 << 16
            server.start()
            await a.flushed(30)
            link = RedisLink(server.url)
            assert sum(await link.commands([("HLEN", name) for name in Layout("m").blocks])) == 80_010
            await link.close()


async def test_the_dead_are_swept_and_the_living_stay(redis_server: RedisServer, link: RedisLink) -> None:
    blocks = keys(300)
    async with (
        await Metadata.connect(redis_server.url, "m") as metadata,
        IndexPublisher(redis_server.url, "m", B) as b,
        IndexMirror(redis_server.url, "m") as mirror,
    ):
        async with IndexPublisher(redis_server.url, "m", A) as a:
            a.committed(b"", blocks)
            await a.flushed()
        b.committed(b"", blocks[:30])
        await b.flushed()
        record = AgentRecord(ref=Ref("b", 2**64 - 1), node="n", code=B, host="h", port=1, host_id="h")
        await metadata.register(record)
        mirror.living({A, B})
        await until(lambda: mirror.match(b"".join(blocks)) == {A: 300, B: 30})
        sweeper = Sweeper(metadata, "m", "me", grace=10)
        await sweeper.sweep(0)
        await sweeper.sweep(9)
        assert sweeper.swept == 0 and (await lookup(link, "m", blocks))[0] == {A: 0, B: 0}
        await sweeper.sweep(10)
        assert sweeper.swept == 1
        assert await lookup(link, "m", blocks) == [{B: 0}] * 30 + [{}] * 270
        assert await link.commands([("HEXISTS", name, A) for name in Layout("m").taken]) == [0]
        await until(lambda: A not in mirror.columns)
        await link.commands([("HSET", Layout("m").blocks[0], blocks[0], b"\0" + A)])  # nothing else known
        await sweeper.sweep(601)
        await sweeper.sweep(611)
        assert sweeper.swept == 2 and await lookup(link, "m", blocks[:1]) == [{}]
        assert mirror.match(b"".join(blocks)) == {B: 30}
        await sweeper.sweep(630)
        assert sweeper.swept == 2


async def test_who_was_swept_by_mistake_comes_back(redis_server: RedisServer, link: RedisLink) -> None:
    async with await Metadata.connect(redis_server.url, "m") as metadata, IndexPublisher(redis_server.url, "m", A) as a:
        a.committed(b"", keys(10))
        await a.flushed()
        one = Sweeper(metadata, "m", "one", interval=0.02, grace=0)
        two = Sweeper(metadata, "m", "two", interval=0.02, grace=0)
        async with one, two:
            await until(lambda: one.swept + two.swept >= 1)
            await until(lambda: a.republished > 0 and a.synced)  # it was alive: all comes back


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    """Two processes with other hash seeds compute and shard the same keys."""
    program = (
        "import numpy as np; from shared.blocks import *; from shared.index import *;"
        "n = Namespace(model='m', weights='w', tokenizer='t', dtype='float32', layers=1, kv_heads=1, head_dim=8,"
        " block_size=16); c = chain_keys(n.root(), np.arange(64, dtype=np.uint32), 16);"
        "print(c.hex(), [shard_of(k, 16) for k in split_keys(c)], n.proof().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1 and outputs.pop()
