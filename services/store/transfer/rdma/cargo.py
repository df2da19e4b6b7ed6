"""What one work request moves: a slice of a job, or the generations that say whether a READ was of the right block."""

from __future__ import annotations

from collections.abc import Sequence

from services.store.transfer.base import Op, Request
from services.store.transfer.batches import Slice
from services.store.transfer.rdma.queue_pair import Work
from services.store.transfer.rdma.reach import Place, Reach
from services.store.transfer.topology.paths import Path
from shared.errors import MooncakeError


class Cargo:
    """``length`` bytes at ``local`` here and ``remote`` there, none of them over the end of a memory region. ``tried``:
    the paths on which it failed. ``slots``: the slots whose generations are read; None for a slice of a job."""

    __slots__ = ("grant", "job", "length", "local", "piece", "reach", "remote", "slots", "tried", "write")

    def __init__(
        self, piece: Slice, reach: Reach, local: Place, remote: Place, length: int, slots: range | None = None
    ) -> None:
        self.piece = piece
        self.job = piece.job
        self.grant = piece.job.request.grant
        self.reach = reach
        self.local = local
        self.remote = remote
        self.length = length
        self.slots = slots
        self.write = piece.job.request.op is Op.WRITE
        self.tried: list[Path] = []

    @property
    def request(self) -> Request:
        return self.job.request

    def refuse(self, error: MooncakeError) -> None:
        """The peer refused it. The requests beside it in the same run are unharmed, unless they would go unchecked."""
        if self.slots is not None or self.reach.table is not None:
            self.piece.settle(error)
        else:
            self.piece.settle(refused=dict.fromkeys(range(len(self.piece.pieces())), error))


def works(taken: Sequence[tuple[int, Cargo]], path: Path, lane: int) -> list[Work]:
    """As they are posted on ``path``. This and what is around it is done for each work request: no call more than need
    be."""
    mine, theirs, high = path.local.name, path.remote.name, lane << 32
    return [
        (high | number, c.write, c.local[0], c.local[1][mine], c.remote[0], c.remote[1][theirs], c.length)
        for number, c in taken
    ]
