"""The RDMA devices in use: let go of when they fail or are removed, and used again when they are back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.store.transfer.rdma.checks import Checks
from services.store.transfer.rdma.nic import Nic
from services.store.transfer.rdma.poller import Poller
from services.store.transfer.rdma.ports import Ports
from services.store.transfer.rdma.regions import Regions
from services.store.transfer.rdma.target import Target
from services.store.transfer.rdma.verbs import LOCAL_WRITE, devices
from shared.errors import MooncakeError
from shared.telemetry import log

if TYPE_CHECKING:
    from pyverbs.mr import MR

CALM = 3
"""Looks at a port that is up again until what lay before it has surely gone out."""

logger = log("transfer.rdma")


class Hardware:
    """Owns the NICs; lives on the loop. ``nics`` is shared by all who use them, and changes in place. ``turned`` is
    told when a port went up or down. ``completions``: see :class:`Nic`."""

    def __init__(self, poller: Poller, checks: Checks, turned: Callable[[str, bool], None], completions: int) -> None:
        self.nics: dict[str, Nic] = {}
        self.ports = Ports(turned)
        self._poller = poller
        self._checks = checks
        self._completions = completions
        self._cells: dict[str, MR] = {}
        self._regions: Regions | None = None
        self._target: Target | None = None

    def start(self, nics: Sequence[Nic]) -> None:
        """Raises NoTransport where no memory can be registered on one of them; all are closed then."""
        left = list(nics)
        try:
            while left:
                self._use(nic := left.pop(0))
                self.ports.watch(nic)
        except MooncakeError:
            for nic in left:
                nic.close()
            self.close()
            self.nics.clear()
            raise

    def carries(self, regions: Regions, target: Target) -> None:
        """What is made on the devices, and goes when they do."""
        self._regions, self._target = regions, target

    def _use(self, nic: Nic) -> None:
        """Raises NoTransport; it is closed then, and the one before, which is lost, stays in its place."""
        try:
            cells = nic.register(self._checks.address, self._checks.size, LOCAL_WRITE)
        except MooncakeError:
            nic.close()
            raise
        self.nics[nic.name] = nic
        self._cells[nic.name] = cells
        self._checks.keys[nic.name] = cells.lkey
        self._poller.watch(nic)

    async def look(self) -> None:
        """Which of them are there, and work."""
        there = devices(next(iter(self.nics.values())).verbs)
        for nic in list(self.nics.values()):
            if not nic.lost and (nic.failed or nic.name not in there):
                self._leave(nic)
            elif nic.lost and nic.name in there:
                try:
                    await self._reopen(nic)
                except MooncakeError as e:
                    logger.info("a device cannot be opened yet", nic=nic.name, error=e.message)
            elif nic.reset:
                nic.calm = nic.calm + 1 if nic.active() else 0
                if nic.calm >= CALM:
                    nic.bury()
        self.ports.look()

    def _leave(self, nic: Nic) -> None:
        """It has failed, or is being removed, which waits until nobody has it open: let go of all that is on it."""
        assert self._target is not None
        logger.error("a device is lost", nic=nic.name)
        nic.failed = True
        self.ports.leave(nic)
        self._target.drop(nic.name)
        self._close(nic)

    async def _reopen(self, old: Nic) -> None:
        """Raises NoTransport."""
        assert self._regions is not None
        nic = Nic(old.verbs, old.name, self._completions)
        nic.ready = False
        self._use(nic)
        try:
            await self._regions.join(nic.name)
        except BaseException:  # whatever it was, the next look tries again
            self._close(nic)
            raise
        nic.ready = True
        self.ports.watch(nic)
        logger.warning("a device is back", nic=nic.name)

    def _close(self, nic: Nic) -> None:
        nic.lost = True
        if self._regions is not None:
            self._regions.leave(nic.name)
        self._cells.pop(nic.name).close()
        self._poller.leave(nic)
        nic.close()

    def close(self) -> None:
        """Queue pairs and regions are closed."""
        self.ports.close()
        for nic in self.nics.values():
            if not nic.lost:
                self._close(nic)
