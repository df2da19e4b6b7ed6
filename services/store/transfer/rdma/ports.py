"""Whether the ports of this agent's NICs are up, and by which addresses they are reached, as their devices tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.store.transfer.rdma.metrics import NIC_ACTIVE
from services.store.transfer.rdma.nic import Nic
from services.store.transfer.rdma.verbs import CQ_ERROR, DEVICE_FATAL, GID_CHANGED, PORT_WENT_DOWN, PORT_WENT_UP
from shared.telemetry import log

logger = log("transfer.rdma")


class Ports:
    """``turned`` is told when one went up or down. One whose address has changed went down and up: whatever used the
    old address is no more."""

    def __init__(self, turned: Callable[[str, bool], None]) -> None:
        self._turned = turned
        self._nics: dict[str, Nic] = {}
        self.up: dict[str, bool] = {}

    def watch(self, nic: Nic) -> None:
        """From now on; it is up, or back."""
        self._nics[nic.name] = nic
        asyncio.get_running_loop().add_reader(nic.events_fd, self._event, nic)
        if nic.name in self.up:
            self._is(nic, nic.active())
        self.up.setdefault(nic.name, True)

    def leave(self, nic: Nic) -> None:
        """It is gone."""
        asyncio.get_running_loop().remove_reader(nic.events_fd)
        del self._nics[nic.name]
        self._is(nic, False)

    def close(self) -> None:
        for nic in self._nics.values():
            asyncio.get_running_loop().remove_reader(nic.events_fd)

    def look(self) -> None:
        """Now and then, should an event be missed."""
        for nic in self._nics.values():
            self._is(nic, nic.active())

    def _event(self, nic: Nic) -> None:
        """What a device says of itself: a lost link is known here before retries are over."""
        for event in nic.events():
            if event in (PORT_WENT_UP, PORT_WENT_DOWN):
                self._is(nic, nic.active())
            elif event == GID_CHANGED and nic.readdressed():
                self._is(nic, False)
                self._is(nic, nic.active())
            elif event in (DEVICE_FATAL, CQ_ERROR):
                logger.error("the device failed", nic=nic.name, what=event)
                nic.failed = True
                self._is(nic, False)

    def _is(self, nic: Nic, up: bool) -> None:
        NIC_ACTIVE.labels(nic.name).set(up)
        if up == self.up[nic.name]:
            return
        self.up[nic.name] = up
        logger.warning("a port went up" if up else "a port went down", nic=nic.name)
        self._turned(nic.name, up)
