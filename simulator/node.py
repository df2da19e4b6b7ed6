"""A node: its NICs and its KV pool; and when it died, for those who were lent something by it."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.link import Nic
from simulator.pool import Pool


@dataclass(eq=False)
class Node:
    id: str
    nic: Nic
    pool: Pool
    alive: bool = True

    def fail(self) -> None:
        """What it holds is gone, and its transfers with it."""
        self.alive = False
        self.pool.clear()
        self.nic.fail()
