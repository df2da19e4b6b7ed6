"""By how much the time between tokens that counts, the mean of a request's worst tenth, exceeds a decode step. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import overload

import numpy as np

from services.conductor.scheduling.views import Floats

MOST = 64
LEAST = 4
WINDOW_S = 30.0
"""Who sees no answers, since all are refused for what was seen half a minute ago, has to try."""
MOST_OF_OBJECTIVE = 0.5
"""So much of an objective at most: what is as far off was a stall of the machine, and no reason to refuse everybody."""


class Tail:
    """Learnt from the answers that ended lately: the median, so that half of them were slower, and that a few which
    were held up do not count. In seconds, not as a factor: hand-overs and the machine's jitter take as long beside
    long steps as beside short ones."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=MOST)
        self._seconds = 0.0

    def observe(self, excess: float, now: float) -> None:
        """``excess``: see :func:`jitter`."""
        self._seen.append((now, excess))
        self._learn()

    def seconds(self, now: float) -> float:
        before = len(self._seen)
        while self._seen and self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()
        if len(self._seen) < before:
            self._learn()
        return self._seconds

    def _learn(self) -> None:
        enough = len(self._seen) >= LEAST
        self._seconds = max(0.0, median(excess for _, excess in self._seen)) if enough else 0.0


def jitter(worst: float, step: float, gaps: Sequence[float]) -> float:
    """Seconds by which the mean of the ``worst`` tenth of an answer's intervals exceeded its step: the one that was
    predicted, or the mean of its own ``gaps`` after the hand-over, where the batch has grown since. The growth is no
    jitter, and the step of whoever is placed next has it already."""
    return worst - max(step, fmean(gaps[1:]) if len(gaps) > 1 else 0.0)


@overload
def counted(tail: float, objective: float) -> float: ...
@overload
def counted(tail: float, objective: Floats) -> Floats: ...
def counted(tail: float, objective: float | Floats) -> float | Floats:
    """What of ``tail`` is added to a step that is held against ``objective``."""
    if isinstance(objective, np.ndarray):
        found: Floats = np.minimum(tail, MOST_OF_OBJECTIVE * objective)
        return found
    return min(tail, MOST_OF_OBJECTIVE * objective)
