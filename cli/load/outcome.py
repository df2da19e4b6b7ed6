"""What became of one request of a load."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class End(StrEnum):
    """How a request ended: with its answer, refused for now (429), failed, or not before the load was stopped."""

    OK = "ok"
    REJECTED = "rejected"
    ERROR = "error"
    UNFINISHED = "unfinished"


@dataclass(slots=True)
class Outcome:
    """Seconds since the load began, but for durations. ``due``: when the request arrives by the trace; ``late``: how
    much later the generator sent it, by its own fault. ``ttft`` counts from ``due``, so that such a delay is no gain;
    after a 429 that was obeyed it counts from the new attempt. ``tbt``: mean of the worst tenth of the gaps.
    ``tries`` - 1 answers were 429s whose ``Retry-After`` was obeyed; ``refusals`` are the seconds that each 429 took.
    ``cached`` None: the server does not say. ``input_tokens``, ``output_tokens``: as the trace has them;
    ``prompt_tokens``, ``completion_tokens``: as the server counted; where it did not, 0 and the tokens that came."""

    number: int
    due: float
    input_tokens: int
    output_tokens: int
    late: float = 0.0
    tries: int = 0
    end: End = End.UNFINISHED
    error: str = ""
    ttft: float | None = None
    tbt: float | None = None
    mean_gap: float | None = None
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0
    refusals: tuple[float, ...] = ()

    def meets(self, slo_ttft: float, slo_tbt: float) -> bool:
        """Effective, as the paper has it: answered, and within both objectives. One token alone has no TBT."""
        if self.end is not End.OK or self.ttft is None:
            return False
        return self.ttft <= slo_ttft and (self.tbt or 0.0) <= slo_tbt
