"""What is asked of a device, and what is said of it: addresses, room in its completion queue, its record. No device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cli.status import nics
from services.store.transfer.rdma import verbs
from services.store.transfer.rdma.gids import Gid, matching, rank
from services.store.transfer.rdma.nic import LEAST, Nic
from services.store.transfer.rdma.status import record_of
from services.store.transfer.topology.paths import Nic as Load
from shared.errors import NoTransport

LINK_LOCAL = Gid(0, "fe80::5054:ff:fe12:3456", verbs.GID_ROCE_V2)
V1 = Gid(1, "::ffff:10.77.0.1", verbs.GID_ROCE_V1)
V2 = Gid(2, "::ffff:10.77.0.1", verbs.GID_ROCE_V2)
V6 = Gid(3, "2001:db8::1", verbs.GID_ROCE_V2)
RANKED = rank([LINK_LOCAL, V1, V2, V6])


def nic(room: int = 100, most: int = 1000, entries: list[Any] | None = None) -> Nic:
    """One whose device is not there."""
    made = Nic.__new__(Nic)
    made.name, made.gids, made.mtu, made.broken = "mlx5_0", RANKED, 5, 3
    made.failed = made.lost = False
    made.moved = {"read": 10, "write": 20}
    made._room = room
    made.limits = SimpleNamespace(max_qp_wr=most)  # type: ignore[assignment]
    made.verbs = SimpleNamespace(Error=OSError)  # type: ignore[assignment]
    made.context = SimpleNamespace(query_gid_table=lambda most: entries or [])  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("::ffff:10.77.0.9", verbs.GID_ROCE_V2, V2),
        ("::ffff:10.77.0.9", verbs.GID_ROCE_V1, V1),
        ("2001:db8::9", verbs.GID_ROCE_V2, V6),
        ("fe80::9", verbs.GID_ROCE_V2, LINK_LOCAL),
        ("2001:db8::9", verbs.GID_ROCE_V1, None),
        ("fe80::9", verbs.GID_IB, None),
    ],
)
def test_an_address_is_answered_from_one_of_its_kind_and_family(text: str, kind: int, expected: Gid | None) -> None:
    """Whatever is best here: the peer's index says nothing of ours."""
    assert matching(RANKED, text, kind) == expected


def test_work_requests_in_flight_never_exceed_the_completion_queue() -> None:
    """All of them are announced when their queue pairs break, also those that are not when they are done."""
    device = nic(room=100, most=64)
    assert [device.take(128), device.take(128)] == [64, 36]
    with pytest.raises(NoTransport, match="mlx5_0 has room for 0 more"):
        device.take(128)
    device.give(LEAST - 1)
    with pytest.raises(NoTransport, match=f"room for {LEAST - 1} more"):
        device.take(128)
    device.give(1)
    assert device.take(128) == LEAST


def entry(index: int, text: str) -> SimpleNamespace:
    return SimpleNamespace(gid_index=index, port_num=1, gid_type=verbs.GID_ROCE_V2, gid_str=lambda: text)


def test_a_device_that_was_readdressed_says_so_once() -> None:
    device = nic(entries=[entry(0, "fe80::1"), entry(5, "::ffff:10.77.0.50")])
    assert device.readdressed() and str(device.gid) == "10.77.0.50 (RoCE v2, index 5)"
    assert not device.readdressed()


def test_a_device_without_any_address_left_keeps_the_old_one() -> None:
    device = nic(entries=[entry(0, "::")])
    assert not device.readdressed() and device.gid == RANKED[0]


def test_the_record_says_why_a_device_carries_nothing() -> None:
    device, load = nic(), Load("mlx5_0")
    load.queued = 7
    active = record_of(device, load, True, 2, 50.0)
    assert (active.state, active.pairs, active.queued, active.read, active.written) == ("active", 2, 7, 10, 20)
    assert (active.gid, active.mtu, active.broken, active.rest) == ("10.77.0.1 (RoCE v2, index 2)", 4096, 3, 0.0)
    load.rest.failed(50.0)
    resting = record_of(device, load, True, 2, 50.05)
    assert resting.state == "resting" and 0 < resting.rest <= 0.2
    assert record_of(device, load, True, 2, 51.0).state == "active", "rested: a probe is due"
    assert record_of(device, load, False, 2, 50.05).state == "down"
    device.lost = True
    assert record_of(device, load, False, 2, 50.05).state == "lost"


def test_agents_without_devices_make_no_table() -> None:
    assert nics([{"id": "a", "nics": []}, {"id": "b"}]) == []
    (table,) = nics([{"id": "a", "nics": [{"name": "rxe0", "state": "down", "read": 1 << 20}]}])
    assert table.row_count == 1
