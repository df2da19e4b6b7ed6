"""Faults of a stress run: who is killed, stopped or flushed when, and started or resumed again."""

from __future__ import annotations

import heapq
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

from benchmarks.stress.fleet import Fleet, Process

LONGEST_STOP = 4.0
"""Seconds; leases last one."""

LONGEST_DEATH = 2.0

PATIENCE = 60.0
"""Seconds after which one that was started again counts as up, whether it serves or not."""


class Faults:
    """Injects one fault about every ``interval`` seconds. ``kinds`` counts them; :meth:`tick` must be called often."""

    def __init__(self, fleet: Fleet, interval: float, rng: random.Random, clock: Callable[[], float] = time.monotonic):
        self.kinds: Counter[str] = Counter()
        self._fleet = fleet
        self._interval = interval
        self._rng = rng
        self._clock = clock
        self._next = clock() + interval
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._busy: set[str] = set()
        self._starting: dict[str, float] = {}
        self._started = 0
        self._possible: list[tuple[int, Callable[[], str]]] = [
            (5, lambda: self._kill(fleet.agents, "agent_killed")),
            (5, lambda: self._stop(fleet.agents, "agent_stopped")),
            (5, lambda: self._kill(fleet.clients, "client_killed")),
            (5, lambda: self._stop(fleet.clients, "client_stopped")),
            (2, self._flush),
            (2, lambda: self._restart(stale=False)),
            (1, lambda: self._restart(stale=True)),
            (1, self._stop_redis),
        ]

    def tick(self) -> None:
        """Do what is due: ends of faults, then perhaps a new one; whoever died unasked is started again, and noted."""
        now = self._clock()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        for process in self._fleet.processes:
            if process.name in self._starting:
                self._look_at(process, now)
            elif process.name not in self._busy and process.ended_by_itself():
                self._fleet.start(process)
        if now >= self._next:
            self._next = now + self._rng.uniform(0.5, 1.5) * self._interval
            weights = [weight for weight, _ in self._possible]
            if name := self._rng.choices(self._possible, weights)[0][1]():
                self.kinds[name] += 1

    def _look_at(self, process: Process, now: float) -> None:
        """One that was started again is a victim again once it serves: who is killed while it starts, does nothing."""
        if process.ended_by_itself():
            self._fleet.start(process)
        elif now > self._starting[process.name] + PATIENCE or self._fleet.serves(process):
            del self._starting[process.name]
            self._busy.discard(process.name)

    def end(self) -> None:
        """All faults are over at once; nothing new comes."""
        while self._later:
            heapq.heappop(self._later)[2]()

    @property
    def total(self) -> int:
        return self.kinds.total()

    def _after(self, longest: float, then: Callable[[], None]) -> None:
        self._started += 1
        heapq.heappush(self._later, (self._clock() + self._rng.uniform(0, longest), self._started, then))

    def _victim(self, among: list[Process]) -> Process | None:
        """One agent is always left alone: with none, clients would do nothing."""
        if among is self._fleet.agents and len([one for one in among if one.name not in self._busy]) < 2:
            return None
        free = [process for process in among if process.name not in self._busy]
        return self._rng.choice(free) if free else None

    # -- kinds; each returns what it did, "" for nothing -------------------------------------------------------

    def _kill(self, among: list[Process], name: str) -> str:
        victim = self._victim(among)
        if victim is None:
            return ""
        victim.kill()
        self._busy.add(victim.name)

        def start() -> None:
            self._starting[victim.name] = self._clock()
            self._fleet.start(victim)

        self._after(LONGEST_DEATH, start)
        return name

    def _stop(self, among: list[Process], name: str) -> str:
        victim = self._victim(among)
        if victim is None:
            return ""
        victim.signal(signal.SIGSTOP)
        self._busy.add(victim.name)

        def resume() -> None:
            self._busy.discard(victim.name)
            victim.signal(signal.SIGCONT)

        self._after(LONGEST_STOP, resume)
        return name

    def _flush(self) -> str:
        if "redis" in self._busy:
            return ""
        self._fleet.flush_redis()
        return "redis_flushed"

    def _restart(self, stale: bool) -> str:
        """With a copy of now, it comes back after a while in which the index went on without it."""
        if "redis" in self._busy:
            return ""
        if not stale:
            self._fleet.restart_redis()
            return "redis_restarted"
        self._fleet.save_redis()
        self._busy.add("redis")

        def fail_over() -> None:
            self._busy.discard("redis")
            self._fleet.restart_redis(stale=True)

        self._after(LONGEST_STOP, fail_over)
        return "redis_failed_over"

    def _stop_redis(self) -> str:
        if "redis" in self._busy:
            return ""
        self._fleet.redis.signal(signal.SIGSTOP)
        self._busy.add("redis")

        def resume() -> None:
            self._busy.discard("redis")
            self._fleet.redis.signal(signal.SIGCONT)

        self._after(LONGEST_STOP, resume)
        return "redis_stopped"
