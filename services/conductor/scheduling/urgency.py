"""By when a first token is due: short prompts before long ones, within bounds; and who goes before whom. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shared.latency import due_in

NOT_PASSED = 2
"""Of a queue: the prompt that computes, and the one whose landing is there. Nobody goes before them."""

SURELY = 0.05
"""Seconds that a deadline must be later to be taken for later: what conductors' messages and clocks are good for."""


def due(objective: float, compute: float, overtake: float) -> float:
    """Seconds from a request's arrival, at most its ``objective``: what prefill orders its queue by.

    ``compute``: seconds of its prefill. A prompt may be overtaken by those that come up to ``overtake`` times its own
    ``compute`` after it (0: by objective alone). Nobody starves: an objective stands, and who comes after it has passed
    goes behind.
    """
    return min(objective, overtake * compute) if overtake else objective


def latest(objective: float, compute: float, thrift: float) -> float:
    """Seconds from its arrival by which a request must be expected to have its first token, to be let in; at most its
    ``objective``.

    Under overload the seconds of prefill are what is shared out, and a long prompt takes those of many short ones.
    With ``thrift`` it is let in only where it waits less: the slack that its ``compute`` leaves of the objective is
    divided by 1 + thrift · compute / objective. An idle mesh still takes whatever it can do in time.
    """
    if not thrift or compute >= objective:
        return objective
    return compute + (objective - compute) / (1.0 + thrift * compute / objective)


@dataclass(frozen=True, slots=True)
class Turn:
    """What decides a request's place in prefill's queue. ``objective``: seconds from its arrival; ``overtake``: see
    :func:`due`; ``priority``: higher is more urgent."""

    objective: float
    overtake: float = 0.0
    priority: int = 0

    def due(self, compute: float, waited: float = 0.0) -> float:
        """Seconds from now, ``waited`` after its arrival. ``compute``: seconds of its prefill."""
        return due_in(due(self.objective, compute, self.overtake) - waited, self.priority)


@dataclass(frozen=True, slots=True)
class Standing:
    """A prompt in a prefill queue. ``due``: what the queue is ordered by; ``by``: when its first token was promised;
    times of one clock. ``work``: seconds of its prefill."""

    due: float
    by: float
    work: float


def later(queue: Collection[Standing], due: float) -> list[Standing]:
    """Those of a queue that one which is due then may go before, by their turns. Which two are not passed is not known:
    the largest."""
    return sorted((one for one in queue if one.due > due + SURELY), key=lambda one: one.due)


def passed(behind: Collection[Standing]) -> float:
    """Seconds of them that a prompt before whom they are due does not wait for, at least."""
    return sum(sorted(one.work for one in behind)[:-NOT_PASSED])


def harmless(behind: Collection[Standing], end: float, work: float) -> bool:
    """Whether all of them keep their promise if ``work`` seconds are computed before. ``behind``: by their turns;
    ``end``: when the last of them would be done."""
    for one in reversed(list(behind)):
        if end + work > one.by:
            return False
        end -= one.work
    return True
