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
from services.store.tenants import OTHER, Quotas, read_quotas
from shared.engines.base import Owner, PoolClass
from shared.errors import ConfigError, QuotaExceeded
from shared.telemetry import REGISTRY
from tests.store.conftest import NAMESPACE, STRIDE

Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
QUOTA = 4
TENANTS = ["small", "big", ""]


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
        beyond = max(0, quotas.used.get("small", 0) // 10 + new - QUOTA)
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
        assert {t: 10 * n for t, n in count.items()} == quotas.used
        assert quotas.used.get("small", 0) <= QUOTA * 10
    pool.drop(2)
    pool.slots.evict(12)
    assert quotas.used == {} and not quotas.over


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
    assert quotas.over == {"acme"} and pool.slots.tenants.excess("acme") == 3
    assert pool.slots.evict_own("acme", 3) == 0
    pool.release(1, [h.hold for h in held])
    assert pool.slots.evict_own("acme", pool.slots.tenants.excess("acme")) == 3
    assert pool.contains(keys) == [True, True, False, False, False]  # the leaf first
    assert not quotas.over


def test_the_file_of_quotas(tmp_path: Path) -> None:
    path = tmp_path / "quotas.yaml"
    path.write_text("acme: 2GiB\nbeta: 4096\n7: 0\n")
    assert read_quotas(str(path)) == {"acme": 2 << 30, "beta": 4096, "7": 0}
    for text in ("[1, 2]", "acme: many", "acme: true", "acme: [1]", "a: b: c"):
        path.write_text(text)
        with pytest.raises(ConfigError) as wrong:
            read_quotas(str(path))
        assert wrong.value.field == "tenant_quotas" and str(path) in wrong.value.message
    with pytest.raises(ConfigError):
        read_quotas(str(tmp_path / "absent"))


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
        assert shown("big") is None


def shown(tenant: str) -> float | None:
    return REGISTRY.get_sample_value("mooncake_store_tenant_bytes", {"tenant": tenant})
