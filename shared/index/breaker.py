"""Mass expiry: when most agents vanish at once, the registry is the suspect: nobody is purged unasked. Pure.

Only purging waits. Vanished agents are routed around at once: they do not count as living.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shared.records import AgentRecord
from shared.registration import TTL

LEAST = 3
SHARE = 0.5
SILENCE = 60.0
"""Seconds without an answer on its data port until a spared agent may be purged after all."""
ASK_AGAIN = 5.0
MISSES = 3
"""And so many questions in vain: silence while nobody asked proves nothing."""


@dataclass(frozen=True)
class _Gone:
    """An agent that is not registered any more. ``heard``: when it last was known to live. ``misses``: how often it was
    asked in vain since."""

    record: AgentRecord
    since: float
    heard: float
    asked: float = float("-inf")
    misses: int = 0


class Breaker:
    """Told of every look at the registry and of every answer on a data port; says who must not be purged.

    It trips when at least LEAST agents and more than SHARE of all vanish within ``ttl`` seconds. From then on until
    none of them is left, whoever vanishes is spared: until registered again, or replaced, or silent for ``silence``
    seconds.
    """

    def __init__(self, ttl: float = TTL, silence: float = SILENCE) -> None:
        self._ttl = ttl
        self._silence = silence
        self._registered: dict[bytes, AgentRecord] = {}
        self._gone: dict[bytes, _Gone] = {}  # vanished lately, and nothing unusual in that
        self._spared: dict[bytes, _Gone] = {}
        self.tripped = 0

    @property
    def spared(self) -> frozenset[bytes]:
        """Codes of agents that are not registered and must be kept all the same."""
        return frozenset(self._spared)

    def look(self, agents: Iterable[AgentRecord], now: float) -> None:
        """These are registered now. Not to be called with what is not fresh."""
        living = {agent.code: agent for agent in agents}
        for code in self._registered.keys() - living.keys():
            self._gone[code] = _Gone(self._registered[code], now, now)
        self._registered = living
        self._settle(now)
        if self._spared or self._massive():
            self.tripped += not self._spared
            self._spared |= self._gone
            self._gone = {}

    def due(self, now: float) -> list[AgentRecord]:
        """Who is to be asked on its data port now; they count as asked."""
        due = [code for code, gone in self._spared.items() if now - gone.asked >= ASK_AGAIN]
        for code in due:
            self._spared[code] = replace(self._spared[code], asked=now)
        return [self._spared[code].record for code in due]

    def answered(self, code: bytes, now: float) -> None:
        """It did, when asked on its data port."""
        if code in self._spared:
            self._spared[code] = replace(self._spared[code], heard=now, misses=0)

    def silent(self, code: bytes) -> None:
        """It did not, in the time it had."""
        if code in self._spared:
            self._spared[code] = replace(self._spared[code], misses=self._spared[code].misses + 1)

    def _massive(self) -> bool:
        return len(self._gone) >= LEAST and len(self._gone) > SHARE * (len(self._gone) + len(self._registered))

    def _settle(self, now: float) -> None:
        """Drop those of whom something is known: registered again, replaced, silent for too long."""
        ids = {agent.ref.id for agent in self._registered.values()}
        addresses = {(agent.host, agent.port) for agent in self._registered.values()}

        def open_question(code: bytes, gone: _Gone) -> bool:
            """Where an agent is registered now, another incarnation cannot be any more."""
            record = gone.record
            there = record.ref.id in ids or (record.host, record.port) in addresses
            return code not in self._registered and not there

        self._gone = {c: g for c, g in self._gone.items() if open_question(c, g) and now - g.since < self._ttl}
        self._spared = {c: g for c, g in self._spared.items() if open_question(c, g) and not self._dead(g, now)}

    def _dead(self, gone: _Gone, now: float) -> bool:
        return now - gone.heard >= self._silence and gone.misses >= MISSES
