"""When requests of a trace arrive: spread within ticks, compressed in time, cut short. Pure, streaming, by seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice, takewhile
from random import Random

from shared.workload.trace import BLOCK, TraceRequest

TICK_S = 3.0
"""The released traces of real traffic note arrivals every three seconds."""


def spread(requests: Iterable[TraceRequest], seed: int = 0, tick_s: float = TICK_S) -> Iterator[TraceRequest]:
    """Requests noted at one and the same instant, moved to random instants before the next noted one, and at most
    ``tick_s`` later; their order stays. One that stands alone stays where it is: its trace has no ticks there.

    Deterministic: the same seed moves the group at the same instant alike, whatever else is in the trace. An arrival of
    the last group has nothing after it, and takes up to ``tick_s``.
    """
    groups = ((arrival, list(group)) for arrival, group in groupby(requests, lambda request: request.arrival))
    held: tuple[float, list[TraceRequest]] | None = None
    for arrival, group in groups:
        if held is not None:
            yield from _moved(*held, min(tick_s, arrival - held[0]), seed)
        held = arrival, group
    if held is not None:
        yield from _moved(*held, tick_s, seed)


def compressed(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """The same requests ``factor`` times as fast. Raises ValueError where ``factor`` is not positive."""
    if not factor > 0:
        raise ValueError(f"a compression of {factor:g} is not positive")
    return (request._replace(arrival=request.arrival / factor) for request in requests)


def at_rate(requests: Iterable[TraceRequest], rate: float) -> list[TraceRequest]:
    """All of them, compressed or stretched so that ``rate`` arrive a second in the mean. Raises ValueError where
    ``rate`` is not positive."""
    if not rate > 0:
        raise ValueError(f"a rate of {rate:g} is not positive")
    every = list(requests)
    now = mean_rate(every)
    return list(compressed(every, rate / now)) if now else every


def mean_rate(requests: list[TraceRequest]) -> float:
    """Arrivals per second between the first and the last; 0 where they are at one instant."""
    length = requests[-1].arrival - requests[0].arrival if requests else 0.0
    return (len(requests) - 1) / length if length > 0 else 0.0


def cut(
    requests: Iterable[TraceRequest], count: int | None = None, duration_s: float | None = None
) -> Iterator[TraceRequest]:
    """The first ``count`` of them, and those that arrive before ``duration_s``."""
    some = iter(requests) if count is None else islice(requests, count)
    return some if duration_s is None else takewhile(lambda request: request.arrival < duration_s, some)


def shortened(requests: Iterable[TraceRequest], divisor: int) -> Iterator[TraceRequest]:
    """For small models: every length divided by ``divisor``, rounded up, over the same ids; a block then has
    ``BLOCK // divisor`` tokens, which is what :func:`shared.workload.tokens.prompt_tokens` must be told.

    Raises ValueError where ``divisor`` does not divide ``BLOCK``.
    """
    if divisor < 1 or BLOCK % divisor:
        raise ValueError(f"{divisor} does not divide blocks of {BLOCK} tokens")
    return (
        request._replace(
            input_tokens=-(-request.input_tokens // divisor), output_tokens=-(-request.output_tokens // divisor)
        )
        for request in requests
    )


def _moved(arrival: float, group: list[TraceRequest], length: float, seed: int) -> Iterator[TraceRequest]:
    if len(group) == 1:
        yield from group
        return
    draw = Random(f"{seed}/{arrival!r}").random
    for offset, request in zip(sorted(draw() for _ in group), group, strict=True):
        yield request._replace(arrival=arrival + length * offset)
