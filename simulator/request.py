"""A request on its way through the simulated cluster, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.workload.trace import TraceRequest

KEY = np.dtype(">u8")


def keys_of(chain: tuple[int, ...]) -> bytes:
    """The block keys (16 bytes each) that the conductor is asked with: the trace's ids are chained already."""
    pairs = np.zeros((len(chain), 2), dtype=KEY)
    pairs[:, 1] = chain
    return pairs.tobytes()


@dataclass(eq=False, slots=True)
class Request:
    """``ended``: "done", or why it was rejected. Times in seconds since the beginning, -1 where it never came to that.

    ``tbt_decode``: the same without the first interval, which has the landing in it.
    ``hit``: prompt tokens of its first prefill that were not computed, ``fetched`` of them from another node.
    ``compute``: seconds of prefill in all. ``tbt``: mean of the longest tenth of the intervals between its tokens.
    ``attempts``: how often it was placed. ``predicted``: TTFT as expected when it was placed.
    """

    number: int
    trace: TraceRequest
    ended: str = ""
    first_token: float = -1.0
    finished: float = -1.0
    hit: int = 0
    fetched: int = 0
    compute: float = 0.0
    tbt: float = 0.0
    tbt_decode: float = 0.0
    tbt_mean: float = 0.0
    attempts: int = 0
    predicted: float = 0.0
    prefill: str = ""
    decode: str = ""
    made: int = 0
    """Output tokens made so far."""
    last_token: float = -1.0
    intervals: list[npt.NDArray[np.float64]] = field(default_factory=list)
    """Between tokens of attempts that failed; those of the last one are the decode instance's."""

    @property
    def output(self) -> int:
        """Tokens to make; a trace may say 0, but a prefill always makes one."""
        return max(1, self.trace.output_tokens)

    @property
    def ttft(self) -> float:
        return self.first_token - self.trace.arrival


TAIL = 0.1
"""TBT of a request: the mean of this share of its intervals, the longest ones."""


def tail_mean(intervals: npt.NDArray[np.float64]) -> float:
    """0 where there are none."""
    if not len(intervals):
        return 0.0
    worst = max(1, round(TAIL * len(intervals)))
    return float(np.partition(intervals, len(intervals) - worst)[-worst:].mean())
