"""How commands are told of a trace: a file, which arrivals are spread, cut and hurried; and its errors as theirs."""

from __future__ import annotations

import math

import click

from shared.errors import MooncakeError
from shared.workload.arrivals import compressed, cut, spread
from shared.workload.trace import TraceRequest, read_trace


def whole_trace(path: str) -> list[TraceRequest]:
    """Raises ClickException for what is no trace, or is empty."""
    try:
        requests = list(read_trace(path))
    except MooncakeError as error:
        raise click.ClickException(str(error)) from None
    if not requests:
        raise click.ClickException(f"{path} has no request")
    return requests


def replayed(path: str, seed: int, speed: float, count: int | None, ticks: bool = False) -> list[TraceRequest]:
    """The first ``count`` requests, spread within the trace's ticks unless ``ticks``, ``speed`` times as fast."""
    requests = cut(whole_trace(path), count)
    return list(compressed(requests if ticks else spread(requests, seed), speed))


def numbers(text: str, name: str) -> list[float]:
    """``"1000,1e4,inf"``. Raises BadParameter for what is no positive number."""
    values = []
    for part in text.split(","):
        try:
            values.append(float(part))
        except ValueError:
            raise click.BadParameter(f"{part!r} in {name} is no number") from None
        if not values[-1] > 0 or math.isnan(values[-1]):
            raise click.BadParameter(f"{part!r} in {name} is not positive")
    return values
