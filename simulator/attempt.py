"""One attempt at a request: placed, submitted, streamed, decoded; or lost, and placed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from services.conductor.scheduling.urgency import due
from simulator.conductor import Conductor, Placed
from simulator.decode import Landing
from simulator.link import Release
from simulator.prefill import Job
from simulator.request import Request, tail_mean

if TYPE_CHECKING:
    from simulator.cluster import Cluster


class Attempt:
    """Whatever its two halves report comes here, and counts once. ``retry``: it failed, place the request again."""

    def __init__(
        self, cluster: Cluster, conductor: Conductor, request: Request, placed: Placed, retry: Callable[[Request], None]
    ) -> None:
        self._cluster, self._conductor, self._request, self._placed = cluster, conductor, request, placed
        self._retry = retry
        self._open = True
        self._coming = 0
        self._landing: Landing | None = None
        request.attempts += 1

    def submit(self) -> None:
        """The messages have come to prefill and decode: both accept, or the attempt is over."""
        cluster, decision, request = self._cluster, self._placed.decision, self._request
        p, d = cluster.prefills[decision.prefill], cluster.decodes[decision.decode]
        chain, tokens = request.trace.hash_ids, request.trace.input_tokens + request.made
        landing = Landing(request, chain, tokens, self._joined, self._finished, self._lost)
        if not (p.alive and d.alive and d.admit(landing)):
            self._lost()
            return
        self._landing = landing
        self._count(1)
        sources = [cluster.nodes[agent] for agent, _ in decision.sources] if decision.fetch_blocks else []
        job = Job(request, chain, tokens, decision.fetch_blocks, sources, self._started, self._first, self._lost)
        settings = cluster.settings
        job.due = request.trace.arrival + due(settings.due, decision.alone, settings.overtake)
        p.submit(job)
        request.prefill, request.decode = p.id, d.id
        self._placed.booking.settle_prefill()
        self._placed.booking.settle_decode()
        self._conductor.report(p, cluster.clock.now)
        self._conductor.report(d, cluster.clock.now)

    def _started(self, job: Job, releases: list[list[Release]]) -> None:
        cluster, decision, request = self._cluster, self._placed.decision, self._request
        if request.first_token < 0:
            request.hit, request.fetched = job.cached, job.fetched
        if self._landing and not self._landing.dead:
            nodes, size = cluster.prefills[decision.prefill].nodes, cluster.settings.hardware.bytes_per_token
            cluster.decodes[decision.decode].receive(self._landing, nodes, releases, size)

    def _first(self, job: Job) -> None:
        """TTFT ends here."""
        request, now = self._request, self._cluster.clock.now
        if not self._open:
            return
        if request.first_token < 0:
            request.first_token = now
        else:
            request.intervals.append(np.array([now - request.last_token]))
        request.made += 1
        request.last_token = now
        self._placed.booking.prefilled(now)
        if self._landing:
            self._cluster.decodes[self._placed.decision.decode].start(self._landing)

    def _joined(self, landing: Landing) -> None:
        self._count(-1)

    def _finished(self, landing: Landing) -> None:
        request = self._request
        self._close()
        intervals = np.concatenate(request.intervals) if request.intervals else np.empty(0)
        request.intervals.clear()
        request.tbt_decode = tail_mean(intervals[1:])
        request.tbt, request.tbt_mean = tail_mean(intervals), float(intervals.mean()) if len(intervals) else 0.0
        request.finished = self._cluster.clock.now
        self._cluster.ended(request, "done")

    def _lost(self, half: Job | Landing | None = None) -> None:
        if self._open:
            landing, decode = self._landing, self._cluster.decodes[self._placed.decision.decode]
            self._close()
            if landing and not landing.dead:
                decode.forget(landing)
            self._retry(self._request)

    def _close(self) -> None:
        self._open = False
        self._placed.booking.end()
        self._count(-1)

    def _count(self, more: int) -> None:
        """What other conductors hear of it until it decodes."""
        if self._coming + more in (0, 1):
            self._coming += more
            landing = self._landing
            self._conductor.count(self._placed.decision.decode, more, more * (landing.room if landing else 0))
