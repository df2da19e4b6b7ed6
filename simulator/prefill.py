"""A prefill instance: a queue by deadline, fetches while queued, chunks through the stages of its group."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from shared.latency import PrefillModel, PrefillSample, fit_prefill
from shared.messages import Load
from shared.workload.trace import BLOCK
from simulator.clock import Clock
from simulator.link import Flow, Release
from simulator.node import Node
from simulator.pool import Hold
from simulator.request import Request

GROUP_SECONDS = 0.05
"""Layers are streamed in groups of that much compute, as the live one does."""

MOST_GROUPS = 6

LENGTHS = (512, 2048, 8192, 32_768, 131_072)
"""Of prompts that a group's model is fitted to."""


@dataclass(eq=False, slots=True)
class Job:
    """One attempt at a prefill. ``chain``, ``tokens``: the prompt, or what is prefilled again after a failure.
    ``fetch``: blocks to have from ``sources`` (nodes, the planned one first). ``started(job, releases)``: it computes;
    for each stage, when how many of its bytes may be sent. ``finished``: the first token. ``lost``: the instance died.
    ``due``: earlier ones compute first. ``cached``: tokens not to compute, of which the queue has ``counted`` so many.
    """

    request: Request
    chain: tuple[int, ...]
    tokens: int
    fetch: int
    sources: Sequence[Node]
    started: Callable[[Job, list[list[Release]]], None]
    finished: Callable[[Job], None]
    lost: Callable[[Job], None]
    due: float = 0.0
    cached: int = 0
    counted: int = 0
    fetched: int = 0
    held: Hold | None = None
    lent: tuple[Node, Hold] | None = None
    flow: Flow | None = None
    dead: bool = False


@dataclass(slots=True)
class Waiting:
    """What the queue has to compute, as the live instance counts it."""

    requests: int = 0
    tokens: int = 0
    squares: int = 0

    def count(self, tokens: int, cached: int, sign: int) -> None:
        self.requests += sign
        self.tokens += sign * (tokens - cached)
        self.squares += sign * (tokens * tokens - cached * cached)

    def seconds(self, model: PrefillModel) -> float:
        return model.base * self.requests + model.linear * self.tokens + model.square * self.squares


@dataclass(eq=False)
class PrefillInstance:
    """``nodes``: its stages; the first one's pool has the blocks."""

    id: str
    clock: Clock
    nodes: Sequence[Node]
    model: PrefillModel
    chunk: int
    bytes_per_token: int
    ssd_rate: float
    jobs: set[Job] = field(default_factory=set)
    alive: bool = True
    busy: float = 0.0

    def __post_init__(self) -> None:
        self._ready: list[tuple[float, int, Job]] = []
        self._order = count()
        self._waiting = Waiting()
        self._stages = [0.0] * len(self.nodes)
        self._computing = False
        self._ssd_free = 0.0

    @property
    def predicted(self) -> PrefillModel:
        """What conductors are told: the latency of a prompt on an idle group, fitted as a calibration would."""
        if len(self.nodes) == 1:
            return self.model
        return fit_prefill([PrefillSample(n, p, self._idle(n, p)) for n in LENGTHS for p in (0, n // 2, n * 9 // 10)])

    def _idle(self, tokens: int, cached: int) -> float:
        size = len(self.nodes)
        starts = range(cached, tokens, self.chunk)
        shares = [self._seconds(at, min(tokens, at + self.chunk), tokens) for at in starts]
        return sum(shares) + (size - 1) * max(shares)

    def _seconds(self, at: int, upto: int, tokens: int) -> float:
        """Of a chunk at one stage; what any prompt takes comes with its last one."""
        base = self.model.base if upto < tokens else 0.0
        return (self.model.seconds(upto, at) - base) / len(self.nodes)

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def load(self) -> Load:
        left = max(0.0, self._stages[0] - self.clock.now) + self._waiting.seconds(self.model) / len(self.nodes)
        return Load(queued=len(self.jobs), queue_ms=1000 * left)

    def submit(self, job: Job) -> None:
        """It is queued, and what it should not compute is brought here meanwhile."""
        pool = self.head.pool
        here, fast = pool.match(job.chain)
        job.held = pool.hold(job.chain[: max(here, job.fetch)])
        self.jobs.add(job)
        job.cached = job.counted = min(here * BLOCK, job.tokens - 1)
        self._waiting.count(job.tokens, job.counted, 1)
        ready = self._read_ssd(job, here - fast) if fast < here else self.clock.now
        if job.fetch > here and self._fetch(job, here):
            return
        self.clock.at(ready, self._becomes_ready, job)

    def fail(self) -> None:
        """The node died: its jobs are lost."""
        self.alive = False
        jobs, self.jobs = sorted(self.jobs, key=lambda job: job.request.number), set()
        for job in jobs:
            job.dead = True
            if job.flow:
                job.flow.cancel()
            self._give_back(job)
        self._ready.clear()
        self._waiting = Waiting()
        self._computing = False
        for job in jobs:
            job.lost(job)

    def revive(self) -> None:
        self.alive = True
        self._stages = [self.clock.now] * len(self.nodes)

    def _read_ssd(self, job: Job, blocks: int) -> float:
        """When they are in DRAM; one after the other."""
        begins = max(self.clock.now, self._ssd_free)
        self._ssd_free = begins + blocks * BLOCK * self.bytes_per_token / self.ssd_rate
        return self._ssd_free

    def _fetch(self, job: Job, here: int) -> bool:
        """From the first source that has more than is here; an index may be stale."""
        for source in job.sources:
            blocks = min(source.pool.match(job.chain)[0], job.fetch) if source.alive else 0
            if source is not self.head and blocks > here:
                part = job.chain[here:blocks]
                size = len(part) * BLOCK * self.bytes_per_token
                job.lent = source, source.pool.hold(part)
                ready, lost = partial(self._arrived, job, blocks, here), partial(self._missed, job)
                job.flow = Flow(self.clock, source.nic, self.head.nic, [(0.0, size)], ready, lost)
                return True
        return False

    def _arrived(self, job: Job, blocks: int, here: int) -> None:
        self._return_loan(job)
        self.head.pool.put(job.chain[here:blocks], fetched=True)
        job.fetched = min(blocks * BLOCK, job.tokens - 1) - here * BLOCK
        self._count_again(job, min(blocks * BLOCK, job.tokens - 1))
        self._becomes_ready(job)

    def _count_again(self, job: Job, cached: int) -> None:
        """Of what is queued, so many tokens more are there."""
        self._waiting.count(job.tokens, job.counted, -1)
        job.counted = cached
        self._waiting.count(job.tokens, job.counted, 1)

    def _missed(self, job: Job) -> None:
        """The source died: what is missing is computed."""
        self._return_loan(job)
        self._becomes_ready(job)

    def _becomes_ready(self, job: Job) -> None:
        if job.dead:
            return
        heapq.heappush(self._ready, (job.due, next(self._order), job))
        self._next()

    def _next(self) -> None:
        if self._computing or not self._ready:
            return
        _, _, job = heapq.heappop(self._ready)
        self._computing = True
        here, _ = self.head.pool.match(job.chain)
        self._waiting.count(job.tokens, job.counted, -1)
        job.cached = min(here * BLOCK, job.tokens - 1)
        job.fetched = min(job.fetched, job.cached)
        ends, releases = self._compute(job)
        self.clock.at(ends, self._end, job)  # first: whoever is next finds what this one leaves
        self.clock.at(self._stages[0], self._stage_free, job)
        job.started(job, releases)

    def _compute(self, job: Job) -> tuple[float, list[list[Release]]]:
        """Walk the chunks through the stages: stage j computes chunk c after its chunk c-1, and after stage j-1 has."""
        now, stages, size = self.clock.now, self._stages, len(self.nodes)
        share = self.bytes_per_token // size
        releases: list[list[Release]] = [[(now, job.cached * share)] for _ in stages]
        at = job.cached
        while at < job.tokens:
            upto = min(job.tokens, at + self.chunk)
            seconds = self._seconds(at, upto, job.tokens)
            before = now
            for stage in range(size):
                begins = max(stages[stage], before, now)
                before = stages[stage] = begins + seconds
                releases[stage] += _groups(begins, seconds, at * share, upto * share)
            job.request.compute += seconds * size
            self.busy += seconds * size
            if upto < job.tokens:
                self.clock.at(before, self._computed, job, upto // BLOCK)
            at = upto
        return stages[-1], releases

    def _stage_free(self, job: Job) -> None:
        if not job.dead:
            self._computing = False
            self._next()

    def _computed(self, job: Job, blocks: int) -> None:
        """Blocks of a chunk are there for all to use as soon as it is computed."""
        if not job.dead:
            self.head.pool.put(job.chain[:blocks])

    def _end(self, job: Job) -> None:
        if job.dead:
            return
        self.jobs.discard(job)
        self._give_back(job)
        self.head.pool.put(job.chain)
        job.finished(job)

    def _return_loan(self, job: Job) -> None:
        if job.lent:
            source, hold = job.lent
            job.lent = None
            source.pool.release(hold)

    def _give_back(self, job: Job) -> None:
        self._return_loan(job)
        if job.held:
            self.head.pool.release(job.held)
            job.held = None


def _groups(begins: float, seconds: float, before: int, after: int) -> list[Release]:
    """A chunk's bytes, of one group of layers after the other: the last one is as small as the live one's, those before
    are put together, which only makes fewer turns."""
    last = min(1.0, GROUP_SECONDS / seconds) if seconds > 0 else 1.0
    groups = min(MOST_GROUPS, round((1 - last) * seconds / GROUP_SECONDS))
    shares = [(1 - last) * (n + 1) / groups for n in range(groups)] + [1.0]
    return [(begins + seconds * share, before + round((after - before) * share)) for share in shares]
