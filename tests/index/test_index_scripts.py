"""The Lua scripts against their twin in Python: the same answers, the same hash, the same stream, whatever is asked."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from shared.blocks import KEY
from shared.embedded import RedisServer
from shared.index import Layout
from shared.index.digest import State, rotated, unpack_state, xor_keys
from shared.index.entry import ADD, BEGIN, DELETE, END, FORCE, REPUBLISH, Entry, pack, swept
from shared.index.lookup import unpack_places
from shared.index.twin import ShardTwin
from shared.redis_client import BlockingRedisLink
from shared.redis_scripts import load

CODES = [bytes([n]) * 8 for n in (1, 2, 255)]
KEYS = Layout("m", 1)


class Real:
    """One shard in a real server, with the twin's interface."""

    def __init__(self, url: str) -> None:
        self.link = BlockingRedisLink(url)

    def run(self, name: str, keys: list[str], *args: Any) -> Any:
        return self.link.run(load(name), keys, list(args))

    def apply(self, payload: bytes) -> tuple[str, State | None]:
        status, held = self.run("index_apply", [KEYS.blocks[0], KEYS.stream[0], KEYS.taken[0]], payload, 100)
        return status.decode(), unpack_state(held) if held else None

    def beat(self, code: bytes, state: State, beat: int) -> tuple[State | None, int]:
        keys = [KEYS.blocks[0], KEYS.taken[0], KEYS.told[0]]
        taken, size = self.run("index_beat", keys, code, state.pack() + beat.to_bytes(8, "little"))
        return unpack_state(taken) if taken else None, size

    def sweep(self, dead: list[bytes]) -> None:
        names = [KEYS.blocks[0], KEYS.stream[0], KEYS.taken[0], KEYS.told[0]]
        entries = [part for code in dead for part in (code, swept(code))]
        cursor = b"0"
        while (cursor := self.run("index_sweep", names, cursor, 3, 100, *entries)) != b"0":
            pass

    def held(self, code: bytes, count: int = 3) -> dict[bytes, int]:
        cursor, out = b"0", dict[bytes, int]()
        while True:
            cursor, *page = self.run("index_held", [KEYS.blocks[0]], cursor, count, code)
            out.update(zip(page[::2], page[1::2], strict=True))
            if cursor == b"0":
                return out

    def picture(self) -> tuple[Any, ...]:
        client = self.link.client
        blocks = {key: unpack_places(places) for key, places in client.hgetall(KEYS.blocks[0]).items()}
        taken = {code: unpack_state(state) for code, state in client.hgetall(KEYS.taken[0]).items()}
        told = {
            code: (unpack_state(told), int.from_bytes(told[32:], "little"))
            for code, told in client.hgetall(KEYS.told[0]).items()
        }
        return blocks, taken, told, [fields[b"e"] for _, fields in client.xrange(KEYS.stream[0])]


def picture(twin: ShardTwin) -> tuple[Any, ...]:
    return twin.blocks, twin.taken, twin.told, [payload for _, payload in twin.stream]


def random_entry(rng: random.Random, universe: list[bytes], twin: ShardTwin) -> Entry:
    code = rng.choice(CODES)
    held = twin.taken.get(code, State())
    seq = held.seq + rng.choice([1, 1, 1, 1, 1, 0, 2, -1])
    op = rng.choice([ADD, ADD, ADD, DELETE, DELETE, BEGIN, END])
    keys = b"".join(rng.sample(universe, rng.randint(1, 6))) if op in (ADD, DELETE) else b""
    tier = rng.choice([0, 0, 1])
    flags = rng.choice([0, REPUBLISH]) if op != END else rng.choice([0, 0, FORCE])
    size, xor = held.size, held.xor
    if op == ADD:
        size, xor = size + len(keys) // KEY, xor ^ rotated(xor_keys(keys), tier)
    state = State(max(seq, 0), size, xor)
    return Entry(op, code, state, keys, tier, flags, positions=bytes(len(keys) // KEY * 2))


@pytest.mark.parametrize("seed", range(6))
def test_scripts_and_twin_agree(redis_server: RedisServer, seed: int) -> None:
    rng = random.Random(seed)
    universe = [rng.randbytes(KEY) for _ in range(12)]
    real, twin = Real(redis_server.url), ShardTwin()
    real.link.client.flushall()
    for step in range(120):
        match rng.randrange(12):
            case 0:
                code, state = rng.choice(CODES), State(rng.randrange(2**53), rng.randrange(100), rng.getrandbits(128))
                assert real.beat(code, state, step) == twin.beat(code, state, step)
            case 1:
                dead = rng.sample(CODES, rng.randint(1, 2))
                real.sweep(dead)
                twin.sweep(sorted(dead))
            case 2 if rng.random() < 0.3:
                gone = rng.choice(["blocks", "taken", "told"])
                real.link.client.delete(getattr(KEYS, gone)[0])
                getattr(twin, gone).clear()
            case _:
                payload = pack(random_entry(rng, universe, twin))
                assert real.apply(payload) == twin.apply(payload)
        code = rng.choice(CODES)
        assert real.held(code) == twin.held(code)
    mine, theirs = picture(twin), real.picture()
    assert mine[:3] == theirs[:3]
    assert sorted(mine[3]) == sorted(theirs[3])
    real.link.close()


def test_a_full_entry_and_the_limit_of_the_stream(redis_server: RedisServer) -> None:
    real, twin, rng = Real(redis_server.url), ShardTwin(), random.Random(1)
    real.link.client.flushall()
    size = xor = 0
    for seq in range(1, 300):
        keys = rng.randbytes(KEY * 128)
        size, xor = size + 128, xor ^ xor_keys(keys)
        payload = pack(Entry(ADD, CODES[0], State(seq, size, xor), keys, positions=bytes(256)))
        assert real.apply(payload) == twin.apply(payload) == ("ok", State(seq, size, xor))
    assert real.link.client.xlen(KEYS.stream[0]) < 299
    assert real.held(CODES[0], 1000) == twin.held(CODES[0])
    real.link.close()


def test_other_versions_are_refused(redis_server: RedisServer) -> None:
    real = Real(redis_server.url)
    payload = b"\x02" + pack(Entry(ADD, CODES[0], State(1)))[1:]
    with pytest.raises(Exception, match="unknown index entry version"):
        real.apply(payload)
    real.link.close()


def test_all_keys_of_a_shard_lie_in_one_slot_of_redis_cluster() -> None:
    with RedisServer(cluster=True) as server, redis.Redis(port=server.port) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        layout = Layout("m", 16)
        slots = [
            {client.execute_command("CLUSTER", "KEYSLOT", name) for name in names}
            for names in zip(layout.blocks, layout.stream, layout.taken, layout.told, strict=True)
        ]
    assert all(len(slot) == 1 for slot in slots)
    assert len(set().union(*slots)) > 8
