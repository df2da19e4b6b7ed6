"""An agent's inventory against a dict, its digest against one that is added up anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import KEY
from shared.index.digest import rotated
from shared.index.inventory import Inventory

keys = st.integers(0, 300).map(lambda n: n.to_bytes(KEY, "big"))


@given(st.lists(st.tuples(keys, st.integers(-1, 1)), max_size=60))
def test_it_is_a_dict_with_a_digest(changes: list[tuple[bytes, int]]) -> None:
    inventory, held = Inventory(), dict[bytes, int]()
    for key, tier in changes:
        assert inventory.change(key, tier) == held.get(key, -1)
        if tier >= 0:
            held[key] = tier
        else:
            held.pop(key, None)
    xor = 0
    for key, tier in held.items():
        xor ^= rotated(int.from_bytes(key, "big"), tier)
        assert key in inventory
    assert dict(inventory.items()) == held and set(inventory) == held.keys()
    assert (len(inventory), inventory.xor, inventory.slow) == (len(held), xor, sum(held.values()))
