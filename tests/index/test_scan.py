"""Reading a shard anew: pages in which keys come twice, and in either state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import KEY
from shared.index import code
from shared.index.bins import ENOUGH, Bins, apart
from shared.index.digest import State, rotated
from shared.index.prefix import PrefixIndex
from shared.index.runs import keys_of
from shared.index.scan import Scan

AGENTS = [code(1), code(2)]


def key(number: int, first: int) -> bytes:
    return bytes([first]) + number.to_bytes(KEY - 1, "little")


CHAIN = [key(number, number * 3 % 4) for number in range(60)]
KEYS = st.sampled_from(CHAIN)
PAGES = st.lists(st.dictionaries(KEYS, st.dictionaries(st.sampled_from(AGENTS), st.integers(0, 2), min_size=1)))


@given(PAGES, st.lists(st.tuples(st.integers(0, 1), st.integers(1, 60), st.integers(0, 1)), max_size=4))
def test_what_was_found_is_what_is_held(
    pages: list[dict[bytes, dict[bytes, int]]], before: list[tuple[int, int, int]]
) -> None:
    """Whatever the mirror held; of a key that was seen at two tiers the slower one counts."""
    prefix, scan = PrefixIndex(), Scan(0, {agent: State(7) for agent in AGENTS})
    columns = {agent: prefix.add_column() for agent in AGENTS}
    held: dict[bytes, set[bytes]] = {agent: set() for agent in AGENTS}
    for which, count, tier in before:
        prefix.store(columns[AGENTS[which]], b"".join(CHAIN[:count]), b"", tier)
        held[AGENTS[which]] |= set(CHAIN[:count])
    wanted: dict[bytes, dict[bytes, int]] = {agent: {} for agent in AGENTS}
    for page in pages:
        scan.add({one: b"".join(a + bytes([tier]) for a, tier in places.items()) for one, places in page.items()})
        for one, places in page.items():
            for agent, tier in places.items():
                wanted[agent][one] = max(wanted[agent].get(one, 0), tier > 0)
    for _ in scan.count():
        pass
    for agent, found in wanted.items():
        xor = 0
        for one, tier in found.items():
            xor ^= rotated(int.from_bytes(one, "big"), tier)
        assert scan.states[agent] == State(7, len(found), xor)
    differing = {agent: State(0, len(keys), 1) for agent, keys in held.items()}
    for _ in scan.merge(prefix, columns.__getitem__, differing, range(256)):
        pass
    for agent, found in wanted.items():
        assert {one for some in prefix.inventory(columns[agent]) for one in some} == set(found)
        assert all(prefix.tier(columns[agent], one) == tier for one, tier in found.items())


def test_bins_hold_all_that_was_added() -> None:
    keys, bins = [key(number, number * 7 % 256) for number in range(ENOUGH + 100)], Bins()
    for at in range(0, len(keys), 1000):
        bins.add(b"".join(keys[at : at + 1000]))
    bins.settle()
    assert {one for some in bins.by_byte.values() for one in keys_of(bytes(some))} == set(keys)
    assert all(one[0] == byte for byte, some in bins.by_byte.items() for one in keys_of(bytes(some)))


@given(st.lists(KEYS), st.lists(KEYS))
def test_keys_come_once_and_slow_ones_are_not_fast(fast: list[bytes], slow: list[bytes]) -> None:
    some, others = apart(b"".join(fast), b"".join(slow))
    assert sorted(keys_of(others)) == sorted(set(slow)) and sorted(keys_of(some)) == sorted(set(fast) - set(slow))
