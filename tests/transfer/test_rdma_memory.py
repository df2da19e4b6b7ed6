"""RDMA devices on which no memory can be registered (``ulimit -l``), at the start or when they come back: stand-ins for
devices, since none can be had here that refuses at will."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.store.transfer.base import OpenGuard
from services.store.transfer.rdma import hardware, transport
from services.store.transfer.rdma.nic import Nic
from services.store.transfer.rdma.target import Target
from services.store.transfer.rdma.transport import Rdma
from services.store.transfer.topology.matrix import Matrix, Tiers
from shared.errors import InternalError, NoTransport


class Region:
    lkey = rkey = 7

    def close(self) -> None:
        pass


class Device:
    """As much of a :class:`Nic` as its owner touches. ``takes``: memory may be registered on it."""

    def __init__(self, name: str, takes: bool = True) -> None:
        self.name, self.takes = name, takes
        self.gid, self.mtu, self.moved, self.broken = "::1", 5, {"read": 0, "write": 0}, 0
        self.failed = self.lost = self.closed = False
        self.ready, self.opened, self.calm = True, 1, 0
        self.reset: list[Any] = []
        self.fd, self.events_fd = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
        self.verbs = None

    def register(self, _address: int, _length: int, _access: int) -> Region:
        if not self.takes:
            raise NoTransport("131072 bytes cannot be registered (ulimit -l?)")
        return Region()

    def active(self) -> bool:
        return self.ready and not (self.failed or self.lost)

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        os.close(self.fd)
        os.close(self.events_fd)


@pytest.fixture
async def devices(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Device]]:
    """Those that are found, in their order."""
    found: list[Device] = []

    def open_all(*_: object) -> tuple[list[Nic], Matrix]:
        return cast(list[Nic], list(found)), Matrix({"cpu:0": Tiers(tuple(one.name for one in found))})

    monkeypatch.setattr(transport, "open_all", open_all)
    monkeypatch.setattr(hardware, "devices", lambda _: [one.name for one in found])
    monkeypatch.setattr(transport, "TICK", 0.01)
    monkeypatch.setattr(transport, "WATCH", 0.01)
    yield found


def rdma() -> Rdma:
    return Rdma([], Matrix(), OpenGuard(), 1.0, 4, lambda _: None, lambda _: pytest.fail("nobody is asked"))


async def test_without_memory_at_the_start_there_is_no_rdma_and_it_says_why(devices: list[Device]) -> None:
    """The agent goes on with other transports, and looks at its NICs ten times a second."""
    devices += [Device("a"), Device("b", takes=False), Device("c")]
    mine = rdma()
    with pytest.raises(NoTransport):
        mine.start()
    assert "ulimit" in mine.why and mine.nics() == []
    assert all(device.closed for device in devices)
    await mine.close(InternalError("over"))


@pytest.mark.parametrize("fails", ["cells", "segments"])
async def test_a_device_that_comes_back_without_memory_is_tried_again(
    devices: list[Device], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.append(Device("a"))
    mine, tries = rdma(), list[Device]()
    mine.start()

    def reopened(*_: object) -> Device:
        tries.append(Device("a", takes=fails != "cells" or len(tries) > 1))
        return tries[-1]

    async def join(_: str) -> None:
        if fails == "segments" and len(tries) <= 2:
            raise OSError("none of our errors")

    monkeypatch.setattr(hardware, "Nic", reopened)
    assert mine._regions is not None
    monkeypatch.setattr(mine._regions, "join", join)
    first, devices[:] = devices[0], []
    async with asyncio.timeout(100):
        while mine.nics()[0].state != "lost":
            await asyncio.sleep(0.01)
        devices.append(first)
        while mine.nics()[0].state != "active":
            await asyncio.sleep(0.01)
    assert len(tries) == 3 and [one.closed for one in tries] == [True, True, False]
    await mine.close(InternalError("over"))
    assert first.closed and tries[-1].closed


async def test_a_look_that_breaks_is_not_the_last(devices: list[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers destroy the connections of those who do not say any more what they keep."""
    devices.append(Device("a"))
    looks, again = list[int](), asyncio.Event()

    def look(_: Target) -> None:
        looks.append(1)
        if len(looks) == 1:
            raise RuntimeError("a bug")
        again.set()

    monkeypatch.setattr(Target, "look", look)
    mine = rdma()
    mine.start()
    async with asyncio.timeout(100):
        await again.wait()
    await mine.close(InternalError("over"))
