"""What ``mooncake calibrate`` measures of an engine: prompts by length and cached part, steps by batch and context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import NamedTuple, TypeVar

from shared.engines.base import Draw, Engine, Work
from shared.engines.calibrate import GREEDY, SLOTS, Clock, slots, tokens
from shared.engines.private_pool import anonymous_pool
from shared.latency import DecodeSample, PrefillSample

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CACHED = (0.0, 0.5, 0.875)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 256, 1024, 4096, 16384)
MOST_KV = 131_072
"""Tokens that the sequences of one step attend to, at most."""

FEW = 6
"""Points of a table that are measured whatever the budget says: fewer leave the fit open."""

PATIENCE = 0.25
"""Share of what is left of the budget that one point may be expected to take."""


P = TypeVar("P")


class PrefillPoint(NamedTuple):
    """A prompt of ``n`` tokens of which ``p`` are there."""

    n: int
    p: int


class DecodePoint(NamedTuple):
    """A step of ``batch`` sequences of ``context`` tokens each."""

    batch: int
    context: int


@dataclass
class Measured:
    """Seconds of every repetition, by point."""

    prefill: dict[PrefillPoint, list[float]] = field(default_factory=dict)
    decode: dict[DecodePoint, list[float]] = field(default_factory=dict)

    def prefill_samples(self) -> list[PrefillSample]:
        """One for each point: the median."""
        return [PrefillSample(*point, median(seconds)) for point, seconds in sorted(self.prefill.items())]

    def decode_samples(self) -> list[DecodeSample]:
        found = sorted(self.decode.items())
        return [DecodeSample(p.batch, p.batch * p.context, median(seconds)) for p, seconds in found]


def prefill_points(longest: int, block: int) -> list[PrefillPoint]:
    """Short ones first. Prompts up to ``longest`` tokens; what is cached are whole blocks, and never all of it."""
    lengths = [n for n in LENGTHS if n < longest] + [longest]
    points = {PrefillPoint(n, min(int(n * share) // block * block, n - 1)) for n in lengths for share in CACHED}
    return sorted(points, key=lambda point: (point.n**2 - point.p**2, point.n))


def decode_points(longest: int, most_batch: int) -> list[DecodePoint]:
    """Few tokens first. Contexts up to ``longest`` tokens."""
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    points = [DecodePoint(batch, context) for batch in BATCHES if batch <= most_batch for context in contexts]
    fitting = [point for point in points if point.batch * point.context <= MOST_KV]
    return sorted(fitting, key=lambda point: (point.batch * (point.context + 256), point))


Progress = Callable[[str, float], None]
"""What is measured now, and the share of the budget that is spent."""


def measure(
    engine: Engine,
    chunk: int,
    longest: int,
    most_batch: int,
    budget_s: float,
    clock: Clock = time.perf_counter,
    progress: Progress = lambda what, share: None,
) -> Measured:
    """Blocking, about ``budget_s`` seconds: half for prompts, half for steps. Prompts are computed in chunks of
    ``chunk`` tokens, as instances do. Points are measured from cheap to dear, again and again; what would take too much
    of the budget is left out, but for the first few. The engine is bound to a pool of its own, to none afterwards.
    """
    found, begin = Measured(), time.perf_counter()

    def spent() -> float:
        return (time.perf_counter() - begin) / max(budget_s, 1e-9)

    longest = max(2, min(longest, engine.context_length - 1))
    with anonymous_pool(engine.namespace.geometry, SLOTS) as pool:
        engine.bind(pool)
        try:
            rig = _Rig(engine, chunk, clock)
            rig.prefill(PrefillPoint(min(64, longest), 0))
            prompts = prefill_points(longest, engine.namespace.block_size)
            for point in _rounds(prompts, found.prefill, begin + budget_s / 2):
                progress(f"prompt of {point.n} tokens, {point.p} cached", spent())
                found.prefill.setdefault(point, []).append(rig.prefill(point))
            rig.decode(DecodePoint(1, min(64, longest)))
            for step in _rounds(decode_points(longest, most_batch), found.decode, begin + budget_s):
                progress(f"{step.batch} sequences of {step.context} tokens", spent())
                found.decode.setdefault(step, []).append(rig.decode(step))
        finally:
            engine.unbind()
    return found


def _rounds(points: Sequence[P], seconds: dict[P, list[float]], until: float) -> Iterator[P]:
    """Points to measure next, until the budget is spent. A point is expected to take what it took last time, or four
    times as long as the one before it."""
    left_out = set[P]()
    for number in count():
        before = 0.0
        for place, point in enumerate(points):
            expected = seconds[point][-1] if point in seconds else 4 * before
            needed = number == 0 and place < FEW
            if not needed and expected > PATIENCE * (until - time.perf_counter()):
                left_out.add(point)
            if needed or point not in left_out:
                yield point
                before = seconds[point][-1]
        if time.perf_counter() > until or len(left_out) == len(points):
            return


class _Rig:
    """Runs points on the engine's thread."""

    def __init__(self, engine: Engine, chunk: int, clock: Clock) -> None:
        self._engine, self._chunk, self._clock = engine, chunk, clock

    def prefill(self, point: PrefillPoint) -> float:
        """Chunk by chunk; the first token is drawn with the last one."""
        begun = self._clock()
        for start in range(point.p, point.n, self._chunk):
            end = min(start + self._chunk, point.n)
            draw = Draw(GREEDY, 0) if end == point.n else None
            self._engine.step([Work(tokens(end - start), start, slots(self._engine, end, 0), draw)])
        return self._clock() - begun

    def decode(self, point: DecodePoint) -> float:
        rows = range(point.batch)
        works = [
            Work(tokens(1), point.context - 1, slots(self._engine, point.context, row), Draw(GREEDY, 1)) for row in rows
        ]
        begun = self._clock()
        self._engine.step(works)
        return self._clock() - begun
