"""A simulated conductor: the live one's ledger and scheduler, told what the live one is told, as late."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from services.conductor.scheduling import (
    Ask,
    Booking,
    Decision,
    Ledger,
    Objectives,
    PolicyOptions,
    Rejection,
    Scheduler,
    SourceView,
    policy,
)
from shared.messages import Load
from shared.workload.trace import BLOCK
from simulator.directory import Directory
from simulator.request import Request, keys_of
from simulator.settings import ClusterSettings


class Reporting(Protocol):
    """An instance, as far as conductors ask."""

    id: str
    alive: bool

    def load(self) -> Load: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """The owner ends ``booking``."""

    decision: Decision
    booking: Booking


class Conductor:
    """``coming``: decode instance -> (requests, blocks) that it has placed there and that do not decode yet."""

    def __init__(self, settings: ClusterSettings, directory: Directory, number: int) -> None:
        options = PolicyOptions(threshold=settings.threshold, rng=random.Random(f"{settings.seed}/{number}"))
        self.ledger = Ledger(settings.hardware.nic)
        self.coming: dict[str, tuple[int, int]] = {}
        self._settings, self._directory = settings, directory
        self._scheduler = Scheduler(policy(settings.policy, options), settings.thrift)
        self._objectives = Objectives(settings.ttft_slo, settings.tbt_slo)
        self._block_bytes = BLOCK * settings.hardware.bytes_per_token

    def place(self, request: Request, tokens: int, now: float, closed: Collection[str]) -> Placed | Rejection:
        """``tokens``: of the prompt and what was made so far. What was accepted once is not refused for being late."""
        trace, settings = request.trace, self._settings
        left = request.output - request.made
        ask = Ask(
            tokens=tokens,
            blocks=len(trace.hash_ids),
            block_size=BLOCK,
            block_bytes=self._block_bytes,
            expected_output=min(left, settings.expected_output),
            waited=now - trace.arrival,
        )
        keys = keys_of(trace.hash_ids)
        matches, fast = self._directory.matches(trace.hash_ids)
        view = self.ledger.view(keys, matches, now, closed, BLOCK, fast)
        if not settings.fetches:
            view.sources = SourceView.none()
        decided = self._scheduler.decide(ask, view, None if request.attempts else self._objectives)
        if isinstance(decided, Rejection):
            return decided
        promised = keys if settings.optimistic else b""
        return Placed(decided, self.ledger.book(decided, ask, promised, now))

    def report(self, instance: Reporting, now: float) -> None:
        self.ledger.report(instance.id, instance.load(), now)

    def count(self, decode: str, requests: int, blocks: int) -> None:
        """One more (or less) of its requests is on the way to that instance."""
        before = self.coming.get(decode, (0, 0))
        self.coming[decode] = before[0] + requests, before[1] + blocks
