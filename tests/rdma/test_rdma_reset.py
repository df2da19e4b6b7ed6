"""Queue pairs that were reset on Soft-RoCE and are destroyed late, against devices that are not there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.store.transfer.rdma import verbs
from services.store.transfer.rdma.checks import Checks
from services.store.transfer.rdma.hardware import CALM, Hardware
from services.store.transfer.rdma.nic import Nic
from services.store.transfer.rdma.poller import Poller
from services.store.transfer.rdma.queue_pair import DEPTH, QueuePair
from tests.examples import examples

ROOM = 6 * DEPTH
IN_HARDWARE = 0x15B3


class Device:
    """What the driver has: its port, and what was done to its queue pairs, in order. ``refuses``: which of these it
    does not do."""

    def __init__(self, vendor: int = verbs.SOFT_ROCE) -> None:
        self.up = True
        self.vendor = vendor
        self.refuses: set[str] = set()
        self.done: list[tuple[str, int]] = []

    def does(self, what: str, number: int) -> None:
        self.done.append((what, number))
        if what in self.refuses:
            raise OSError(what)

    def query_port(self, port: int) -> Any:
        return SimpleNamespace(state=verbs.PORT_ACTIVE if self.up else verbs.PORT_ACTIVE - 1)


class Pair:
    """A queue pair of the driver."""

    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def modify(self, attr: Any, mask: int) -> None:
        assert (attr.qp_state, mask) == (verbs.STATE_RESET, verbs.STATE)
        self.device.does("reset", self.number)

    def close(self) -> None:
        self.device.does("destroyed", self.number)


def nic_of(device: Device) -> Nic:
    nic = Nic.__new__(Nic)
    nic.name, nic.failed, nic.lost, nic.ready = "rxe0", False, False, True
    nic.reset, nic.calm, nic._room = [], 0, ROOM
    nic.limits = SimpleNamespace(max_qp_wr=DEPTH, vendor_id=device.vendor)  # type: ignore[assignment]
    nic.verbs = SimpleNamespace(  # type: ignore[assignment]
        Error=OSError, QPAttr=SimpleNamespace, devices=lambda: [SimpleNamespace(name=b"rxe0")]
    )
    nic.context = device  # type: ignore[assignment]
    return nic


def pair_of(nic: Nic, device: Device, number: int = 1) -> QueuePair:
    pair = QueuePair.__new__(QueuePair)
    pair.nic, pair.depth, pair._qp = nic, nic.take(DEPTH), Pair(device, number)  # type: ignore[assignment]
    return pair


def hardware_of(nic: Nic) -> Hardware:
    hardware = Hardware(Poller(10), Checks(), lambda name, up: None, ROOM)
    hardware.nics[nic.name] = nic
    return hardware


async def test_a_pair_on_a_port_that_is_down_is_reset_and_destroyed_when_it_has_been_up_for_a_while() -> None:
    device = Device()
    nic = nic_of(device)
    hardware, pair = hardware_of(nic), pair_of(nic, device)
    device.up = False
    pair.leave()
    for _ in range(10):
        await hardware.look()
    assert device.done == [("reset", 1)] and nic._room == ROOM - DEPTH, "its completions may yet come"
    for up in (True, False, True):  # what lay before the port has not surely gone out
        device.up = up
        for _ in range(CALM - 1):
            await hardware.look()
    assert device.done == [("reset", 1)]
    await hardware.look()
    assert device.done == [("reset", 1), ("destroyed", 1)] and nic._room == ROOM and not nic.reset
    await hardware.look()
    assert len(device.done) == 2


async def test_one_more_reset_pair_begins_the_wait_anew() -> None:
    device = Device()
    nic = nic_of(device)
    hardware = hardware_of(nic)
    device.up = False
    pair_of(nic, device, 1).leave()
    device.up = True
    await hardware.look()
    device.up = False
    pair_of(nic, device, 2).leave()
    device.up = True
    for _ in range(CALM - 1):
        await hardware.look()
    assert len(nic.reset) == 2
    await hardware.look()
    assert not nic.reset and {number for what, number in device.done if what == "destroyed"} == {1, 2}


@pytest.mark.parametrize("why", ["the port is up", "no Soft-RoCE", "the device is lost", "it cannot be reset"])
def test_other_pairs_are_destroyed_at_once(why: str) -> None:
    device = Device(IN_HARDWARE if why == "no Soft-RoCE" else verbs.SOFT_ROCE)
    nic = nic_of(device)
    pair = pair_of(nic, device)
    device.up = why == "the port is up"
    nic.lost = why == "the device is lost"
    device.refuses = {"reset"} if why == "it cannot be reset" else set()
    pair.leave()
    assert device.done[-1] == ("destroyed", 1) and not nic.reset and nic._room == ROOM
    assert ("reset", 1) not in device.done or device.refuses


def test_a_device_that_lets_go_of_none_has_failed_and_each_was_tried() -> None:
    device = Device()
    nic = nic_of(device)
    device.up = False
    for number in (1, 2, 3):
        pair_of(nic, device, number).leave()
    device.refuses = {"destroyed"}
    nic.bury()
    assert nic.failed and not nic.reset
    assert {number for what, number in device.done if what == "destroyed"} == {1, 2, 3}


def test_what_was_reset_goes_before_the_device_is_closed() -> None:
    device = Device()
    nic = nic_of(device)
    device.up = False
    pair_of(nic, device).leave()
    part = SimpleNamespace(close=lambda: device.does("closed", 0))
    nic.cq = nic._channel = nic.pd = part  # type: ignore[assignment]
    nic.context = SimpleNamespace(close=part.close, query_port=device.query_port)  # type: ignore[assignment]
    nic.close()
    assert device.done == [("reset", 1), ("destroyed", 1), *[("closed", 0)] * 4]


class LateMachine(RuleBasedStateMachine):
    """A port flaps while pairs come and go: each gives its room back once, none is destroyed while it is down."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device()
        self.nic = nic_of(self.device)
        self.loop = asyncio.new_event_loop()
        self.hardware = hardware_of(self.nic)
        self.alive: list[QueuePair] = []
        self.made = 0

    @precondition(lambda self: self.nic._room >= DEPTH and self.nic.active())
    @rule()
    def make(self) -> None:
        self.made += 1
        self.alive.append(pair_of(self.nic, self.device, self.made))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.alive))
        self.alive.remove(pair)
        seen = len(self.device.done)
        pair.leave()
        assert [what for what, _ in self.device.done[seen:]] == ["destroyed" if self.device.up else "reset"]

    @rule()
    def turn(self) -> None:
        self.device.up = not self.device.up

    @rule()
    def look(self) -> None:
        seen = len(self.device.done)
        self.loop.run_until_complete(self.hardware.look())
        assert self.device.up or len(self.device.done) == seen

    @invariant()
    def room_is_that_of_the_pairs_there_are(self) -> None:
        there = len(self.alive) + len(self.nic.reset)
        assert self.nic._room == ROOM - DEPTH * there
        destroyed = [number for what, number in self.device.done if what == "destroyed"]
        assert len(destroyed) == len(set(destroyed)) == self.made - there

    def teardown(self) -> None:
        self.device.up = True
        for _ in range(CALM):
            self.loop.run_until_complete(self.hardware.look())
        assert not self.nic.reset
        self.room_is_that_of_the_pairs_there_are()
        self.loop.close()


TestLate = LateMachine.TestCase
TestLate.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
