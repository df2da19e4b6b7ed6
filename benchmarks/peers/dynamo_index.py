"""Dynamo's compiled radix tree from its wheel, as a contender of ``benchmarks.index``: answers JSON lines."""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from typing import Any

from benchmarks.peers.index_load import DOCUMENTS, Prefixes, prefixes
from benchmarks.peers.lines import Answer, answer, die_with_parent, own_stdout


class Index:
    def __init__(self, workers: int) -> None:
        self.load: Prefixes = prefixes(workers)
        self.tree: Any = importlib.import_module("dynamo.llm").RadixTree()
        self.events = 0
        stores = [(worker, self.stored(before, blocks), len(blocks)) for worker, before, blocks in self.load.stores()]
        begin = time.perf_counter()
        for worker, event, _ in stores:
            self.tree.apply_event(worker, event)
        self.tree.find_matches([1])  # the tree works in a thread of its own: this comes after all of it
        self.applied = sum(count for *_, count in stores) / (time.perf_counter() - begin)
        for worker, block in self.load.removals():
            self.tree.apply_event(worker, self.event({"removed": {"block_hashes": [block]}}))

    def event(self, data: Any) -> bytes:
        self.events += 1
        return json.dumps({"event_id": self.events, "dp_rank": 0, "data": data}).encode()

    def stored(self, before: int | None, blocks: list[int]) -> bytes:
        named = [{"block_hash": block, "tokens_hash": block} for block in blocks]
        return self.event({"stored": {"parent_hash": before, "blocks": named}})

    def scores(self, document: int, length: int) -> dict[str, int]:
        found = self.tree.find_matches(self.load.documents[document][:length]).scores
        return {str(worker[0] if isinstance(worker, tuple) else worker): blocks for worker, blocks in found.items()}

    def times(self, length: int, count: int) -> list[float]:
        """Microseconds of ``count`` lookups, one document after the other: wall time, the tree has a thread."""
        chains = [document[:length] for document in self.load.documents]
        find, out = self.tree.find_matches, list[float]()
        for turn in range(count):
            chain = chains[turn % DOCUMENTS]
            begin = time.perf_counter()
            find(chain)
            out.append(1e6 * (time.perf_counter() - begin))
        return out


class Contender:
    """``build`` a tree for so many workers, then ``times`` and ``scores`` of it."""

    def __init__(self) -> None:
        self.index: Index | None = None

    async def handle(self, said: Answer) -> Answer:
        if said["do"] == "build":
            self.index = None
            self.index = Index(said["workers"])
            return {"applied": self.index.applied}
        assert self.index is not None
        if said["do"] == "times":
            return {"us": self.index.times(said["length"], said["count"])}
        return {"scores": self.index.scores(said["document"], said["length"])}


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(answer(Contender().handle, own_stdout(), {"ready": True}))
