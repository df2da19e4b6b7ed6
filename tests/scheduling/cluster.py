"""Views for policies, and a small cluster in virtual time around the real ledger and scheduler."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.conductor.scheduling import (
    Ask,
    Booking,
    Decision,
    DecodeView,
    Ledger,
    Objectives,
    PolicyOptions,
    PrefillView,
    Scheduler,
    SourceView,
    View,
    policy,
)
from shared.blocks import KEY, chain_keys
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Load

BLOCK = 32
PREFILL = PrefillModel(0.01, 1e-3, 0.0)
DECODE = DecodeModel(0.02, 0.001, 0.0)


def prefill_view(queue: Sequence[float], own: Sequence[int], **more: Any) -> PrefillView:
    """Instances p0, p1 ... with agents a0, a1 ...; models all alike."""
    n = len(queue)
    columns: dict[str, Any] = {
        "ids": [f"p{i}" for i in range(n)],
        "agents": [f"a{i}" for i in range(n)],
        "queue": np.array(queue, dtype=float),
        "base": np.full(n, PREFILL.base),
        "linear": np.full(n, PREFILL.linear),
        "square": np.full(n, PREFILL.square),
        "here": np.array(own, dtype=float),
        "own": np.array(own, dtype=float),
        "ready": np.zeros(n),
        "below": np.zeros(n, dtype=np.int64),
        "disk": np.ones(n),
        "inbound": np.zeros(n),
        "open": np.ones(n, dtype=bool),
        "turn": np.zeros(n, dtype=np.int64),
    }
    return PrefillView(**{**columns, **more})


def source_view(blocks: Sequence[int], **more: Any) -> SourceView:
    n = len(blocks)
    columns: dict[str, Any] = {
        "agents": [f"a{i}" for i in range(n)],
        "blocks": list(blocks),
        "dram": list(blocks),
        "disk": [1.0] * n,
        "rate": [1e6] * n,
        "backlog": [0.0] * n,
        "prefill": [True] * n,
    }
    return SourceView(**{**columns, **more})


def decode_view(running: Sequence[float], **more: Any) -> DecodeView:
    n = len(running)
    columns: dict[str, Any] = {
        "ids": [f"d{i}" for i in range(n)],
        "base": np.full(n, DECODE.base),
        "per_sequence": np.full(n, DECODE.per_sequence),
        "per_token": np.full(n, DECODE.per_token),
        "running": np.array(running, dtype=float),
        "kv_tokens": np.zeros(n),
        "room": np.full(n, 2**40),
        "total": np.full(n, 2**40),
        "most": np.full(n, 2**40),
        "limit": np.full(n, np.inf),
        "assigned": np.zeros(n, dtype=np.int64),
        "open": np.ones(n, dtype=bool),
        "turn": np.zeros(n, dtype=np.int64),
        "live_row": np.zeros(0, dtype=np.int64),
        "live_joins": np.zeros(0),
        "live_leaves": np.zeros(0),
        "live_tokens": np.zeros(0),
        "live_promised": np.full(len(more.get("live_row", ())), np.inf),
    }
    return DecodeView(**{**columns, **more})


@dataclass
class Views:
    prefill: Callable[..., PrefillView] = prefill_view
    source: Callable[..., SourceView] = source_view
    decode: Callable[..., DecodeView] = decode_view

    def all(self, queue: Sequence[float], own: Sequence[int], sources: Sequence[int], running: Sequence[float]) -> View:
        return View(prefill_view(queue, own), decode_view(running), source_view(sources))

    def ask(self, tokens: int, **more: Any) -> Ask:
        columns: dict[str, Any] = {"block_size": BLOCK, "block_bytes": 1000, "expected_output": 16}
        return Ask(tokens=tokens, blocks=tokens // BLOCK, **{**columns, **more})


@dataclass
class Instance:
    """A prefill instance of the small cluster: one prompt after the other. ``free``: when all are done."""

    cached: set[bytes] = field(default_factory=set)
    free: float = 0.0
    busy: float = 0.0


class Cluster:
    """Requests go through the real ledger and scheduler; instances compute by the same latency models.

    ``served``, ``decoded``: requests by instance. ``computed``, ``prompt``: tokens. Load is reported once a second.
    """

    def __init__(
        self, name: str, prefills: int, decodes: int, rate: float = 1e8, seed: int = 0, **options: Any
    ) -> None:
        self.ledger = Ledger(link_rate=rate)
        self.scheduler = Scheduler(policy(name, PolicyOptions(rng=random.Random(seed), **options)))
        self.objectives: Objectives | None = None
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.instances = {f"p{i}": Instance() for i in range(prefills)}
        self.served: Counter[str] = Counter()
        self.decoded: Counter[str] = Counter()
        self.computed = self.prompt = self.fetches = self.rejected = 0
        self._order = 0
        for i, id in enumerate(self.instances):
            self.ledger.put_prefill(id, f"a{i}", PREFILL)
            self.ledger.put_agent(f"a{i}", prefill=True)
        for i in range(decodes):
            self.ledger.put_decode(f"d{i}", DECODE)

    def at(self, time: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self.events, (time, self._order, what))

    def run(self) -> None:
        while self.events:
            self.now, _, what = heapq.heappop(self.events)
            what()

    def matches(self, keys: bytes) -> dict[str, int]:
        found = {}
        for i, instance in enumerate(self.instances.values()):
            length = 0
            while length < len(keys) // KEY and keys[length * KEY : (length + 1) * KEY] in instance.cached:
                length += 1
            if length:
                found[f"a{i}"] = length
        return found

    def submit(self, tokens: Any, output: int = 16) -> None:
        keys = chain_keys(b"root" * 4, tokens, BLOCK)
        ask = Ask(len(tokens), len(keys) // KEY, BLOCK, 100_000, output)
        decided = self.scheduler.decide(ask, self.ledger.view(keys, self.matches(keys), self.now), self.objectives)
        if not isinstance(decided, Decision):
            self.rejected += 1
            return
        booking = self.ledger.book(decided, ask, keys, self.now)
        self.served[decided.prefill] += 1
        self.decoded[decided.decode] += 1
        self.fetches += bool(decided.fetch_blocks)
        self.begin(decided, booking, ask, keys)

    def begin(self, decided: Decision, booking: Booking, ask: Ask, keys: bytes) -> None:
        """It starts when the queue and the fetch are done; what it finds then decides how much it computes."""
        instance = self.instances[decided.prefill]
        booking.settle_decode()
        start = max(instance.free, self.now + decided.transfer)

        def compute() -> None:
            own = self.matches(keys).get(f"a{decided.prefill[1:]}", 0)
            cached = min(max(own, decided.fetch_blocks) * BLOCK, ask.tokens - 1)
            self.computed += ask.tokens - cached
            self.prompt += ask.tokens
            seconds = PREFILL.seconds(ask.tokens, cached)
            instance.busy += seconds
            self.at(self.now + seconds, done)

        def done() -> None:
            instance.cached.update(keys[i : i + KEY] for i in range(0, len(keys), KEY))
            booking.prefilled(self.now)
            self.at(self.now + ask.expected_output * decided.step, booking.end)

        instance.free = start + decided.compute
        load = Load(queue_ms=max(instance.free - self.now, 0.0) * 1000)
        self.ledger.report(decided.prefill, load, self.now)
        booking.settle_prefill()
        self.at(start, compute)

    def spread(self) -> float:
        """Busiest over mean, by time computed."""
        busy = [instance.busy for instance in self.instances.values()]
        return max(busy) / (sum(busy) / len(busy))
