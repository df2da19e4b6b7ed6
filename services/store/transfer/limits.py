"""What one agent lets its peers take of it, and how much it queues for each of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """``queued``: bytes of requests under way to one peer; further transfers wait, in order. ``connections``: those
    that peers may have open to this agent, together; ``streams``: data connections of one peer among them.
    ``calls``: of one connection that are being answered. ``frame``: seconds that serving a frame (16 MiB at most) may
    take; a peer that reads or sends slower is cut off, so that it holds no slot for longer."""

    queued: int = 1 << 30
    connections: int = 1024
    streams: int = 64
    calls: int = 1024
    frame: float = 60.0
