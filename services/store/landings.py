"""Landings: slots that one attempt's writer may fill, and what of them is in memory. Pure.

    open --landed--> kept            the slots become ordinary holds
    open --closed, or its engine died--> quarantined --writer and receivers are done--> over

Reports count only for the landing whose token they name (``report_tagged``); a token is never used again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from shared.blocks import Geometry
from shared.errors import Fenced, InvalidInput, NotPermitted
from shared.messages import Ref

Span = tuple[int, int, int, int, int]
"""What was written: (block, first_layer, last_layer, first_token, last_token), ends exclusive."""


class Phase(Enum):
    OPEN = 0
    QUARANTINED = 1


@dataclass
class LandingState:
    """One landing of request ``owner``. ``slots[i]`` and ``holds[i]`` are block i's; blocks in ``have`` are committed
    copies. ``owed`` blocks are the writer's. ``arrived[block, layer, token]``; ``missing`` counts what is owed and has
    not arrived."""

    token: int
    connection: int
    writer: Ref
    tokens: int
    slots: Sequence[int]
    holds: Sequence[int]
    have: frozenset[int]
    geometry: Geometry
    owner: str = ""
    owed: set[int] = field(default_factory=set)
    phase: Phase = Phase.OPEN
    missing: int = 0
    arrived: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        g = self.geometry
        self.arrived = np.zeros((len(self.slots), g.layers, g.block_size), dtype=np.bool_)
        owed, self.owed = self.owed, set()
        self.owe(owed)

    def owe(self, blocks: Iterable[int]) -> list[int]:
        """The writer owes these blocks too. Returns the slots it may write from now on."""
        added = sorted(set(blocks) - self.owed)
        if any(not 0 <= block < len(self.slots) or block in self.have for block in added):
            raise InvalidInput("a block outside the landing, or one that is kept here", field="blocks")
        for block in added:
            self.owed.add(block)
            cells = self.arrived[block, :, : self._tokens_in(block)]
            self.missing += cells.size - int(np.count_nonzero(cells))
        return [self.slots[block] for block in added]

    def _tokens_in(self, block: int) -> int:
        """Tokens of the prompt in this block: the last one may be partial."""
        size = self.geometry.block_size
        return max(0, min(size, self.tokens - block * size))

    def report(self, spans: Iterable[Span]) -> None:
        """Count what is in memory; a repeated report changes nothing. Raises NotPermitted for what was not granted."""
        checked = [self._checked(span) for span in spans]
        for block, first_layer, last_layer, first_token, last_token in checked:
            last_token = min(last_token, self._tokens_in(block))
            cells = self.arrived[block, first_layer:last_layer, first_token:last_token]
            self.missing -= cells.size - int(np.count_nonzero(cells))
            cells[:] = True

    def _checked(self, span: Span) -> Span:
        block, first_layer, last_layer, first_token, last_token = span
        g = self.geometry
        inside = 0 <= first_layer <= last_layer <= g.layers and 0 <= first_token <= last_token <= g.block_size
        if block not in self.owed or not inside:
            raise NotPermitted(f"nothing was granted at block {block}, layers {first_layer} to {last_layer}")
        return span

    @property
    def complete(self) -> bool:
        return self.missing == 0


class LandingTable:
    """All landings of one slab, open and quarantined, by token."""

    def __init__(self) -> None:
        self._landings: dict[int, LandingState] = {}

    def __len__(self) -> int:
        return len(self._landings)

    def open(
        self,
        connection: int,
        writer: Ref,
        tokens: int,
        slots: Sequence[int],
        holds: Sequence[int],
        have: frozenset[int],
        apart: frozenset[int],
        geometry: Geometry,
        owner: str = "",
    ) -> LandingState:
        owed = set(range(len(slots))) - have - apart
        token = secrets.randbits(63)
        landing = LandingState(token, connection, writer, tokens, slots, holds, have, geometry, owner, owed)
        self._landings[token] = landing
        return landing

    def get(self, token: int) -> LandingState:
        """An open landing. Raises Fenced for what is quarantined, over, or was never here."""
        landing = self._landings.get(token)
        if landing is None or landing.phase is not Phase.OPEN:
            raise Fenced("the landing is not open")
        return landing

    def report(self, token: int, writer: Ref, spans: Iterable[Span]) -> LandingState:
        landing = self.get(token)
        if landing.writer != writer:
            raise NotPermitted("the landing belongs to another writer")
        landing.report(spans)
        return landing

    def keep(self, token: int) -> LandingState:
        """The landing is over; its holds live on. Raises Fenced; InvalidInput while something is missing."""
        landing = self.get(token)
        if not landing.complete:
            raise InvalidInput(f"{landing.missing} layer-tokens have not landed", field="keep")
        return self._landings.pop(token)

    def quarantine(self, token: int) -> LandingState | None:
        """Fence it. None when it is not open any more (idempotent)."""
        landing = self._landings.get(token)
        if landing is None or landing.phase is not Phase.OPEN:
            return None
        landing.phase = Phase.QUARANTINED
        return landing

    def end(self, token: int) -> LandingState | None:
        """The writer, its endpoints and our receivers are done with it."""
        landing = self._landings.get(token)
        if landing is None or landing.phase is not Phase.QUARANTINED:
            return None
        return self._landings.pop(token)

    def of_connection(self, connection: int) -> list[int]:
        """Open landings of a connection (``death_fences``)."""
        return [t for t, x in self._landings.items() if x.connection == connection and x.phase is Phase.OPEN]

    @property
    def quarantined(self) -> int:
        """Slots in quarantine."""
        return sum(len(x.slots) - len(x.have) for x in self._landings.values() if x.phase is Phase.QUARANTINED)
