"""Links with a queue on each NIC: flows take turns in quanta, so that those who share a NIC share its rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.clock import Clock

QUANTUM = 256_000_000
"""Bytes that a flow sends before it is the next one's turn: 3 ms of 87 GB/s."""

ALONE = 0.0125
"""Seconds that a turn may take where nobody else uses either NIC: whoever comes waits no longer."""

MOST_TURNS = 64
"""A long flow takes longer turns, rather than more."""


class Nic:
    """A node's NICs taken together, each way ``rate`` bytes per second. ``sent``, ``received``: bytes; ``backlog``:
    bytes that open flows have yet to send; ``*_free``: when what was queued so far has passed."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.sent = self.received = self.backlog = 0
        self.sending_free = self.receiving_free = 0.0
        self.sending_busy = self.receiving_busy = 0.0
        self.flows: set[Flow] = set()

    def fail(self) -> None:
        """All of its flows end, at both ends, without an answer but ``lost``."""
        for flow in sorted(self.flows, key=lambda flow: flow.number):
            flow.lose()


Release = tuple[float, int]
"""(when, bytes that may have been sent in all from then on). Whole bytes: their sums are exact."""


class Flow:
    """Bytes from one NIC to another. ``releases``: ascending; computed KV may only be sent once it is there.

    ``done()`` or ``lost()`` is called once, unless it is cancelled.
    """

    def __init__(
        self,
        clock: Clock,
        source: Nic,
        target: Nic,
        releases: Sequence[Release],
        done: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._clock, self._source, self._target = clock, source, target
        self._releases, self._next = releases, 0
        self._done, self._lost = done, lost
        self.size = releases[-1][1] if releases else 0
        self.left = self.size
        self.open = True
        self.number = clock.ticket()
        self._quantum = max(QUANTUM, self.size // MOST_TURNS)
        source.backlog += self.size
        source.flows.add(self)
        target.flows.add(self)
        clock.at(clock.now, self._turn)

    def cancel(self) -> None:
        if self.open:
            self._close()

    def lose(self) -> None:
        if self.open:
            self._close()
            self._lost()

    def _close(self) -> None:
        self.open = False
        self._source.backlog -= self.left
        self._source.flows.discard(self)
        self._target.flows.discard(self)

    def _turn(self) -> None:
        """Queue the next quantum behind what is queued at both NICs; the next one when this has arrived."""
        if not self.open:
            return
        if self.left <= 0:
            self._close()
            self._done()
            return
        now = self._clock.now
        alone = len(self._source.flows) == len(self._target.flows) == 1
        quantum = max(self._quantum, int(ALONE * self._source.rate)) if alone else self._quantum
        size = min(quantum, self._released(now) - (self.size - self.left))
        if size <= 0:
            self._clock.at(self._releases[self._next][0], self._turn)
        else:
            self._clock.at(self._send(size, now), self._turn)

    def _send(self, size: int, now: float) -> float:
        """When it has arrived: it leaves after what the source has queued, and enters after what the target has."""
        source, target = self._source, self._target
        leaves = max(now, source.sending_free)
        source.sending_free = leaves + size / source.rate
        enters = max(leaves, target.receiving_free)
        arrives = target.receiving_free = max(enters + size / target.rate, source.sending_free)
        source.sending_busy += size / source.rate
        target.receiving_busy += size / target.rate
        source.sent += size
        target.received += size
        source.backlog -= size
        self.left -= size
        return arrives

    def _released(self, now: float) -> int:
        """Bytes that may have been sent by ``now``; afterwards ``_next`` is the release that is waited for."""
        releases = self._releases
        while self._next < len(releases) and releases[self._next][0] <= now:
            self._next += 1
        return releases[self._next - 1][1] if self._next else 0
