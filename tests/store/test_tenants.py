"""Quotas: a tenant over its own loses its own least recently used blocks, and nobody else's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.pool import Pool
from services.store.tenants import NOBODY, OTHER, Quotas, Share, Shares, read_shares, tag_of
from shared.engines.base import Held, Owner, PoolClass
from shared.errors import ConfigError, QuotaExceeded
from shared.telemetry import REGISTRY
from tests.store.conftest import NAMESPACE, STRIDE

Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
QUOTA = 4
SMALL, ACME = tag_of("small"), tag_of("acme")
TENANTS = ["small", "big", ""]
SMALL_OWNER = Owner("put", 0.0, "small")


def key(tenant: str, i: int) -> bytes:
    return f"{tenant}-{i}".encode().ljust(16, b".")


def put(pool: Pool, tenant: str, keys: list[bytes], chained: bool = False) -> bool:
    owner = Owner("put", 0.0, tenant)
    held = pool.reserve(keys, 1, owner, PoolClass.CACHE)
    if held is None:
        return False
    new = [h for h in held if h.slot >= 0 and h.key not in pool.slots.by_key]
    if chained and new:
        pool.commit(1, [h.hold for h in new], b"", [h.key for h in new], [8] * len(new))
    for h in new if not chained else ():
        pool.commit(1, [h.hold], b"", [h.key], [8])
    pool.release(1, [h.hold for h in held])
    return True


def own_victims_are_known_before(pool: Pool) -> None:
    """Also twice: a look changes nothing."""
    for count in (3, 12):
        coming = [pool.slots[slot].key for slot in pool.slots.coming(count, SMALL)]
        assert coming == [pool.slots[slot].key for slot in pool.slots.coming(count, SMALL)]
        pool.slots.dropped.clear()
        assert pool.slots.evict_own(SMALL, count) == len(coming) and pool.slots.dropped == coming


numbers = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)
steps = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "hold", "touch", "remove"]), st.sampled_from(TENANTS), numbers),
    max_size=40,
)


@given(steps, st.booleans())
def test_nobody_goes_for_a_tenant_that_has_too_much(moves: list[tuple[str, str, list[int]]], chained: bool) -> None:
    quotas = Quotas(named={"small": QUOTA * 10})
    pool = Pool(12, lambda slot: True, quotas=quotas, stride=10)
    for move, tenant, numbers in moves:
        keys = [key(tenant, i) for i in numbers]
        before = dict(pool.slots.by_key)
        new = len(set(keys) - before.keys())
        beyond = max(0, quotas.used.get(SMALL, 0) // 10 + new - QUOTA)
        if move == "put":
            put(pool, tenant, keys, chained)
            gone = before.keys() - pool.slots.by_key.keys()
            if tenant == "small":
                assert sum(not k.startswith(b"small") for k in gone) <= new - min(new, beyond), "another's block went"
        elif move == "hold":
            pool.lease(keys, 2, Owner("holder"))
        elif move == "touch":
            pool.release(3, [h.hold for h in pool.lease(keys, 3, Owner("x")) if h is not None])
        else:
            for one in keys:
                pool.remove(one)
        count = Counter(k.split(b"-")[0].decode() for k in pool.slots.by_key)
        assert {tag_of(t): 10 * n for t, n in count.items()} == quotas.used
        assert quotas.used.get(SMALL, 0) <= QUOTA * 10
    own_victims_are_known_before(pool)
    pool.drop(2)
    own_victims_are_known_before(pool)
    assert not quotas.used.get(SMALL)
    pool.slots.evict(12)
    assert quotas.used == {} and not quotas.over


@given(st.lists(st.tuples(st.sampled_from(["reserve", "commit", "abort"]), st.integers(0, 5)), max_size=40))
def test_many_writers_of_a_tenant_at_once_take_no_more_than_its_quota(moves: list[tuple[str, int]]) -> None:
    quotas = Quotas(named={"small": QUOTA * 10})
    pool = Pool(24, lambda slot: True, quotas=quotas, stride=10)
    for i in range(20):
        put(pool, "big", [key("big", i)])
    turn, open_holds = 0, dict[int, list[Held]]()
    for move, writer in moves:
        if move == "reserve" and writer not in open_holds:
            turn += 1
            held = pool.reserve([key("small", 2 * turn + i) for i in range(2)], writer, SMALL_OWNER, PoolClass.CACHE)
            if held is not None:
                open_holds[writer] = held
        elif move == "commit" and writer in open_holds:
            held = open_holds.pop(writer)
            pool.commit(writer, [h.hold for h in held], b"", [h.key for h in held], [8] * 2, chained=False)
            pool.release(writer, [h.hold for h in held])
        elif writer in open_holds:
            pool.drop(writer)
            del open_holds[writer]
        assert quotas.used.get(SMALL, 0) + quotas.writing.get(SMALL, 0) <= QUOTA * 10
        assert quotas.writing.get(SMALL, 0) == 20 * len(open_holds)
        assert all(pool.contains([key("big", i) for i in range(20)])), "another's block went"


def test_the_tenants_own_oldest_go_and_others_stay() -> None:
    pool = Pool(10, lambda slot: True, quotas=Quotas(named={"small": 30}), stride=10)
    for i in range(5):
        put(pool, "big", [key("big", i)])
    for i in range(8):
        assert put(pool, "small", [key("small", i)])
    assert pool.contains([key("small", i) for i in range(8)]) == [False] * 5 + [True] * 3
    assert all(pool.contains([key("big", i) for i in range(5)]))
    with pytest.raises(QuotaExceeded) as refused:
        put(pool, "small", [key("small", i) for i in range(20, 24)])
    assert "at most 30" in refused.value.message and refused.value.field == "tenant"


def test_what_runs_is_not_refused_and_goes_when_it_has_ended() -> None:
    quotas = Quotas(default=20)
    pool = Pool(10, lambda slot: True, quotas=quotas, stride=10)
    keys = [key("acme", i) for i in range(5)]
    held = pool.reserve(keys, 1, Owner("run/1", 1.0, "acme"), PoolClass.PREFILL)
    assert held is not None
    pool.commit(1, [h.hold for h in held], b"", keys, [8] * 5)
    assert quotas.over == {ACME} and pool.slots.tenants.excess(ACME) == 3
    assert pool.slots.evict_own(ACME, 3) == 0
    pool.release(1, [h.hold for h in held])
    assert pool.slots.evict_own(ACME, pool.slots.tenants.excess(ACME)) == 3
    assert pool.contains(keys) == [True, True, False, False, False]  # the leaf first
    assert not quotas.over


def test_the_file_of_quotas(tmp_path: Path) -> None:
    path = tmp_path / "quotas.yaml"
    path.write_text("acme: 2GiB\nbeta: {dram: 4096, ssd: 1TiB}\ngamma: {ssd: 0}\n7: 0\n")
    assert read_shares(str(path)) == {
        "acme": Share(2 << 30),
        "beta": Share(4096, 1 << 40),
        "gamma": Share(ssd=0),
        "7": Share(0),
    }
    for text, why in (
        ("[1, 2]", "no mapping"),
        ("acme: many", "acme: 'many'"),
        ("acme: true", "acme: True"),
        ("acme: [1]", "acme: '[1]'"),
        ("a: b: c", "cannot be read"),
        ("acme: {dram: 1, tape: 2}", "acme: tape is no tier"),
        ("acme: {ssd: lots}", "acme: 'lots'"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as wrong:
            read_shares(str(path))
        assert wrong.value.field == "tenant_quotas" and str(path) in wrong.value.message and why in wrong.value.message
    with pytest.raises(ConfigError):
        read_shares(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("share", "default", "dram", "ssd"),
    [
        (Share(10), Share(0), 10, 100),  # a tenth of DRAM: a tenth of the SSD
        (Share(10, 7), Share(0), 10, 7),
        (Share(10, 0), Share(0), 10, 0),
        (Share(10), Share(0, 30), 10, 30),
        (Share(ssd=7), Share(20), 20, 7),
        (Share(), Share(20), 20, 200),
        (Share(0), Share(20), 0, 0),
    ],
)
def test_who_has_no_share_of_the_ssd_named_has_as_much_of_it_as_of_dram(
    share: Share, default: Share, dram: int, ssd: int
) -> None:
    shares = Shares(default, {"acme": share})
    assert (shares.dram().limit(ACME), shares.ssd(100, 1000).limit(ACME)) == (dram, ssd)
    assert shares.dram().limit(NOBODY) == shares.ssd(100, 1000).limit(NOBODY) == 0
    assert shares.ssd(100, 0).limit(ACME) in (0, share.ssd, default.ssd)


async def test_tenants_of_a_real_agent(start_agent: Start, tmp_path: Path) -> None:
    path = tmp_path / "quotas.yaml"
    path.write_text(f"small: {4 * STRIDE}\n")
    agent = await start_agent(slots=64, tenant_quotas=str(path))
    async with AsyncExitStack() as stack:
        small, big, nobody = [
            await stack.enter_async_context(
                await StoreClient.connect(agent.settings.socket, NAMESPACE, secret="s", owner_name=t, tenant=t)
            )
            for t in ("small", "big", "")
        ]
        assert all(p.stored for p in await big.put([(key("big", i), b"b") for i in range(50)]))
        assert all(p.stored for p in await nobody.put([(key("nobody", i), b"n") for i in range(8)]))
        results = await small.put([(key("small", i), b"s") for i in range(40)])
        assert all(p.stored for p in results), [p.error for p in results if p.error]
        assert await small.contains([key("small", i) for i in range(40)]) == [False] * 36 + [True] * 4
        assert all(await big.contains([key("big", i) for i in range(50)]))
        assert all(await nobody.contains([key("nobody", i) for i in range(8)]))

        held = await small.lease([key("small", i) for i in range(36, 40)], Owner("holder"))
        (refused,) = await small.put([(key("small", 99), b"s")], timeout=0.2)
        assert isinstance(refused.error, QuotaExceeded) and "small" in refused.error.message
        await small.release([h for h in held if h is not None])
        assert [p.stored for p in await small.put([(key("small", 99), b"s")])] == [True]

        async with asyncio.timeout(100):
            while shown("small") != 4 * STRIDE or shown(OTHER) != 58 * STRIDE:
                await asyncio.sleep(0.05)
        assert shown("big") is None and shown("small", "ssd") == 0
        labels = {"tenant": "small", "tier": "dram"}
        assert REGISTRY.get_sample_value("mooncake_store_tenant_quota_bytes", labels) == 4 * STRIDE


def shown(tenant: str, tier: str = "dram") -> float | None:
    return REGISTRY.get_sample_value("mooncake_store_tenant_bytes", {"tenant": tenant, "tier": tier})
