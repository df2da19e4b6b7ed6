"""The clock on RDMA work requests, without devices: what it puts in their way is gone afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers import rdma_posting
from benchmarks.peers.rdma_posting import Posting
from services.store.transfer.rdma.outgoing import Outgoing
from services.store.transfer.rdma.poller import Poller
from services.store.transfer.rdma.queue_pair import QueuePair

TOUCHED = ((Outgoing, "_post"), (Poller, "_drain"), (QueuePair, "_ring"), (QueuePair, "working"), (QueuePair, "post"))


def methods() -> list[Any]:
    return [getattr(owner, name) for owner, name in TOUCHED]


def test_what_is_posted_afterwards_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It once stayed, and a pause of 0.1 s for each post made READs of 64 MiB take 13 s in the next measurement."""
    monkeypatch.setattr(rdma_posting, "PAUSE", 0.0)
    monkeypatch.setattr(QueuePair, "post", lambda pair, works: None)
    before = methods()
    with Posting() as posting:
        assert not set(map(id, methods())) & set(map(id, before))
        pair: Any = QueuePair.__new__(QueuePair)
        pair.post([0] * 3)
        assert posting.count == 3
    assert methods() == before
