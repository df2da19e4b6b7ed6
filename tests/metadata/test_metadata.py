"""Metadata and heartbeats against a real server: expiry, replacement, namespaces, reservations, loss of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest
import redis

from shared.blocks import Namespace
from shared.embedded import RedisServer
from shared.errors import ConfigError, NamespaceMismatch, Refused, StaleIncarnation, Unavailable
from shared.heartbeat import Heartbeat
from shared.messages import Load, Ref
from shared.metadata import Metadata, Reservation, Reserved, Snapshot
from shared.records import AgentRecord, ConductorRecord, InstanceRecord
from shared.redis_scripts import load
from shared.registration import Registration, _Agreement

SPACE = Namespace(
    model="m0", weights="w0", tokenizer="t0", dtype="float32", layers=2, kv_heads=1, head_dim=8, block_size=32
)


def instance(id: str, incarnation: int = 1, space: Namespace = SPACE, model: str = "tiny") -> InstanceRecord:
    return InstanceRecord(
        ref=Ref(id, incarnation),
        role="prefill",
        node="n0",
        model=model,
        namespace=space,
        proof=space.proof(),
        agent=Ref("agent", 1),
        context_length=2048,
        load=Load(queued=3),
    )


def agent(id: str, incarnation: int = 1) -> AgentRecord:
    return AgentRecord(
        ref=Ref(id, incarnation), node="n0", code=incarnation.to_bytes(8, "big"), host="127.0.0.1", port=1, host_id="h"
    )


def differing(field: str) -> Namespace:
    value = getattr(SPACE, field)
    return msgspec.structs.replace(SPACE, **{field: value + 1 if isinstance(value, int) else value + "x"})


async def until(holds: Callable[[], bool], timeout: float = 100.0) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.01)


async def test_records_of_every_kind_come_back_as_they_went(metadata: Metadata) -> None:
    records = (instance("i"), agent("a"), ConductorRecord(ref=Ref("c", 2**64 - 1), node="n", url="http://x"))
    for record in records:
        await metadata.register(record)
    assert await metadata.instances() == [records[0]]
    assert await metadata.agents() == [records[1]]
    assert await metadata.conductors() == [records[2]]
    seen = await metadata.snapshot()
    assert (seen.instances, seen.agents, seen.conductors) == ([records[0]], [records[1]], [records[2]])
    assert set(seen.age) == {"i", "a", "c"} and all(0 <= age < 60 for age in seen.age.values())
    for record in records:
        await metadata.deregister(record)
    assert (await metadata.snapshot()).age == {}


async def test_registration_expires(metadata: Metadata) -> None:
    await metadata.register(instance("short"), ttl=0.05)
    await metadata.register(instance("long"), ttl=60)
    async with asyncio.timeout(100):
        while [record.ref.id for record in await metadata.instances()] != ["long"]:
            await asyncio.sleep(0.01)
    assert await metadata.link.client.hlen("mc:{m}:instance") == 1


async def test_who_died_before_the_clock_of_redis_was_put_back_does_not_live_on(metadata: Metadata) -> None:
    await metadata.register(agent("dead"), ttl=0.3)
    await metadata.register(agent("alive"), ttl=1000)
    (until_key,) = [name for name in await metadata.link.client.keys("*:until") if b"agent" in name]
    (before,) = [float(until) for id, until in await metadata.link.client.zrange(until_key, 0, -1, withscores=True)][:1]
    await metadata.link.client.zadd(until_key, {"dead": before + 600_000})  # as if the clock had been ahead
    seen = await metadata.snapshot()
    assert all(0 <= age < 60 for age in seen.age.values())
    async with asyncio.timeout(100):
        while len(await metadata.agents()) > 1:
            await asyncio.sleep(0.05)
    assert [record.ref.id for record in await metadata.agents()] == ["alive"]


async def test_a_new_incarnation_replaces_the_old_at_once_and_for_good(metadata: Metadata) -> None:
    await metadata.register(instance("i", 1))
    await metadata.register(instance("i", 2))
    await metadata.deregister(instance("i", 1))
    assert [record.ref.incarnation for record in await metadata.instances()] == [2]


async def test_meshes_are_apart(redis_server: RedisServer, metadata: Metadata) -> None:
    await metadata.register(instance("i"))
    async with await Metadata.connect(redis_server.url, "other") as other:
        assert await other.instances() == []
        await other.register(instance("i", space=differing("weights")))


@pytest.mark.parametrize("field", [name for name in Namespace.__struct_fields__ if name not in ("lora", "salt")])
async def test_namespace_mismatch_names_the_field(metadata: Metadata, field: str) -> None:
    await metadata.register(instance("first"))
    with pytest.raises(NamespaceMismatch) as caught:
        await metadata.register(instance("second", space=differing(field)))
    assert caught.value.field == field
    assert len(await metadata.instances()) == 1
    await metadata.register(instance("second", model="another", space=differing(field)))
    await metadata.deregister(instance("first"))
    await metadata.register(instance("third", space=differing(field)))  # nobody living disagrees


async def test_a_restart_may_change_its_own_namespace(metadata: Metadata) -> None:
    await metadata.register(instance("only", 1))
    await metadata.register(instance("only", 2, space=differing("block_size")))
    assert [record.ref.incarnation for record in await metadata.instances()] == [2]


async def test_wrong_proofs_are_refused(metadata: Metadata) -> None:
    wrong = msgspec.structs.replace(instance("i"), proof=b"x" * 16)
    with pytest.raises(NamespaceMismatch) as caught:
        await metadata.register(wrong)
    assert caught.value.field == "proof"
    assert await metadata.instances() == []


async def test_another_way_to_make_keys_is_refused_with_both_proofs(metadata: Metadata) -> None:
    """A version that hashes otherwise agrees on every field."""
    theirs = _Agreement(SPACE.deployment(), b"\xab" * len(SPACE.proof()))
    await metadata.register(instance("i"))
    await metadata.link.client.hset("mc:{m}:namespaces", "tiny", msgspec.msgpack.encode(theirs))
    with pytest.raises(NamespaceMismatch, match=f"{SPACE.proof().hex()} here and abab") as e:
        await metadata.register(instance("j"))
    assert e.value.field == "proof"


async def test_unreadable_records_are_left_out(metadata: Metadata) -> None:
    await metadata.register(instance("i"))
    await metadata.register(instance("broken"))
    value = await metadata.link.client.hget("mc:{m}:instance", "broken")
    await metadata.link.client.hset("mc:{m}:instance", "broken", value[:-20])
    assert [record.ref.id for record in await metadata.instances()] == ["i"]


async def test_garbage_in_its_keys_hides_nobody(metadata: Metadata) -> None:
    """Short, long and empty values, ids that are no text: what is readable is still seen, at every look."""
    await metadata.register(instance("i"))
    client = metadata.link.client
    for kind in ("instance", "agent", "conductor"):
        for n, value in enumerate([b"", b"\xff\x00zzz", b"\xc1" * 26, bytes(200)]):
            await client.hset(f"mc:{{m}}:{kind}", f"junk{n}".encode() + b"\xff", value)
            await client.zadd(f"mc:{{m}}:{kind}:until", {f"junk{n}".encode() + b"\xff": 1e18})
    seen = 0
    async for snapshot in metadata.watch(0.01):
        assert snapshot.fresh and [record.ref.id for record in snapshot.instances] == ["i"]
        seen += 1
        if seen == 1:
            await metadata.register(instance("j"))
            await metadata.deregister(instance("i"))
            break
    async for snapshot in metadata.watch(0.01):
        assert [record.ref.id for record in snapshot.instances] == ["j"]
        break


async def test_garbage_in_its_keys_bars_nobody(metadata: Metadata) -> None:
    """Junk under one's own id is overwritten; junk beside it does not count as another instance."""
    client = metadata.link.client
    for n, value in enumerate([b"", b"zzz", b"\xff" * 26, b"\xff" * 200]):
        await client.hset("mc:{m}:instance", f"junk{n}", value)
        await client.zadd("mc:{m}:instance:until", {f"junk{n}": 1e18})
    await client.hset("mc:{m}:instance", "i", b"short")
    await client.hset("mc:{m}:namespaces", "tiny", b"junk")
    await metadata.register(instance("i"))
    assert [record.ref.id for record in await metadata.instances()] == ["i"]


async def test_a_watch_outlives_an_answer_that_nobody_foresaw(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch is all that a conductor learns of the mesh by: it must not end."""
    await metadata.register(instance("i"))
    real, calls = metadata.snapshot, 0

    async def snapshot() -> Snapshot:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("what is this?")
        return await real()

    monkeypatch.setattr(metadata, "snapshot", snapshot)
    fresh: list[bool] = []
    async for one in metadata.watch(0.01):
        assert [record.ref.id for record in one.instances] == ["i"]
        fresh.append(one.fresh)
        if len(fresh) == 3:
            break
    assert fresh == [True, False, True]


async def test_reservations_sum_renew_release_and_expire(metadata: Metadata) -> None:
    await metadata.exchange([Reservation("r1.1", "d", 10)], (), ttl=60)
    await metadata.exchange([Reservation("r2.1", "d", 5)], (), ttl=60)
    await metadata.exchange([Reservation("r2.1", "p", 7)], (), ttl=60)
    await metadata.exchange([Reservation("r1.1", "d", 11)], (), ttl=60)
    assert await metadata.sums() == {"d": Reserved(16, 2), "p": Reserved(7, 1)}
    await metadata.exchange((), [Reservation("r1.1", "d", 0)])
    await metadata.exchange((), [Reservation("r1.1", "d", 0)])
    assert await metadata.sums() == {"d": Reserved(5, 1), "p": Reserved(7, 1)}
    await metadata.exchange([Reservation(f"x{n}", "d", 1) for n in range(3000)], (), ttl=0.01)
    await metadata.exchange((), [Reservation("r2.1", "p", 0)])
    async with asyncio.timeout(100):
        while await metadata.sums() != {"d": Reserved(5, 1)}:
            await asyncio.sleep(0.01)
    assert await metadata.link.client.zcard("mc:{m}:reserved:until") == 1


async def test_leases_have_one_holder(metadata: Metadata) -> None:
    assert await metadata.hold_lease("sweeper", "one", 60)
    assert not await metadata.hold_lease("sweeper", "two", 60)
    assert await metadata.hold_lease("sweeper", "one", 0.01)
    async with asyncio.timeout(100):
        while not await metadata.hold_lease("sweeper", "two", 60):
            await asyncio.sleep(0.01)


async def test_heartbeat_registers_counts_and_leaves(redis_server: RedisServer, metadata: Metadata) -> None:
    async with Heartbeat(redis_server.url, "m", lambda: agent("a"), interval=0.02) as heart:
        await until(lambda: heart.beats >= 3)
        (record,) = await metadata.agents()
        assert record.beat >= 1 and heart.registered and heart.silence < 60
    assert await metadata.agents() == []


async def test_heartbeat_survives_flush_and_an_error_in_produce(redis_server: RedisServer, metadata: Metadata) -> None:
    broken = False

    def produce() -> AgentRecord:
        if broken:
            raise KeyError("bug")
        return agent("a")

    async with Heartbeat(redis_server.url, "m", produce, interval=0.02) as heart:
        broken = True
        await asyncio.sleep(0.05)
        broken = False
        await metadata.link.client.flushall()
        await metadata.link.client.script_flush()
        beats = heart.beats
        await until(lambda: heart.beats >= beats + 2)
        assert [record.ref.id for record in await metadata.agents()] == ["a"]


async def test_the_replaced_process_gives_up_even_after_a_flush(redis_server: RedisServer, metadata: Metadata) -> None:
    refused: list[Refused] = []
    old = Heartbeat(redis_server.url, "m", lambda: agent("a", 1), interval=0.02, on_refused=refused.append)
    old.start()
    await old.wait()
    async with Heartbeat(redis_server.url, "m", lambda: agent("a", 2), interval=0.02) as new:
        await until(lambda: old.error is not None)
        assert isinstance(old.error, StaleIncarnation) and refused == [old.error] and not old.registered
        await metadata.link.client.flushall()
        beats = new.beats
        await until(lambda: new.beats >= beats + 2)
        assert [record.ref.incarnation for record in await metadata.agents()] == [2]
        old.stop()
        assert [record.ref.incarnation for record in await metadata.agents()] == [2]


async def test_a_resumed_old_incarnation_that_comes_first_after_a_flush_yields(metadata: Metadata) -> None:
    """The later claimed one wins whatever the order in which they come back."""
    old, new = Registration("m"), Registration("m")
    for registration, incarnation in ((old, 1), (new, 2)):
        keys, args = registration.call(agent("a", incarnation))
        registration.answered(await metadata.link.run(load("register"), keys, args), agent("a", incarnation))
    await metadata.link.client.flushall()
    for registration, incarnation in ((old, 1), (new, 2)):
        keys, args = registration.call(agent("a", incarnation))
        registration.answered(await metadata.link.run(load("register"), keys, args), agent("a", incarnation))
    keys, args = old.call(agent("a", 1))
    with pytest.raises(StaleIncarnation):
        old.answered(await metadata.link.run(load("register"), keys, args), agent("a", 1))


async def test_mismatch_ends_the_heartbeat_with_the_field(redis_server: RedisServer, metadata: Metadata) -> None:
    await metadata.register(instance("first"))
    second = instance("second", space=differing("dtype"))
    with pytest.raises(NamespaceMismatch) as caught:
        async with Heartbeat(redis_server.url, "m", lambda: second, interval=0.02):
            pass
    assert caught.value.field == "dtype"


async def test_redis_gone_and_back(metadata: Metadata) -> None:
    with RedisServer() as server:
        async with (
            await Metadata.connect(server.url, "m") as other,
            Heartbeat(server.url, "m", lambda: agent("a"), interval=0.05) as heart,
        ):
            watch = other.watch(0.02)
            assert [record.ref.id for record in (await anext(watch)).agents] == ["a"]
            server.kill()
            before = time.monotonic()
            with pytest.raises(Unavailable):
                await other.exchange([Reservation("r", "i", 1)], ())
            assert time.monotonic() - before < 60
            seen = await anext(watch)
            assert not seen.fresh and seen.stale > 0 and [record.ref.id for record in seen.agents] == ["a"]
            server.start()
            beats = heart.beats
            await until(lambda: heart.beats > beats)
            async with asyncio.timeout(100):
                async for seen in watch:
                    if seen.fresh and seen.agents:
                        break
            await other.exchange([Reservation("r", "i", 1)], ())


async def test_no_redis_is_unavailable_quickly_and_a_bad_address_a_config_error() -> None:
    with pytest.raises(Unavailable):
        await Metadata.connect("redis://127.0.0.1:1/0", "m", timeout=0.1)
    with pytest.raises(ConfigError):
        await Metadata.connect("http://x", "m")
    heart = Heartbeat("redis://127.0.0.1:1/0", "m", lambda: agent("a"), interval=0.05, patience=0.1)
    heart.start()
    with pytest.raises(Unavailable):
        await heart.wait()
    heart.stop()


def test_keys_of_a_mesh_share_a_slot_of_redis_cluster() -> None:
    with RedisServer(cluster=True) as server:
        with redis.Redis(port=server.port) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

        async def main() -> None:
            url = server.url.replace("://", "+cluster://").removesuffix("/0")
            async with await Metadata.connect(url, "m") as metadata:
                await metadata.register(instance("i"))
                await metadata.register(agent("a"))
                assert set((await metadata.snapshot()).age) == {"i", "a"}
                await metadata.exchange([Reservation("r", "i", 3)], ())
                assert await metadata.sums() == {"i": Reserved(3, 1)}

        asyncio.run(main())
