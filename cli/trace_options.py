"""How commands are told of a trace and of settings: files, and what is wrong with them, as errors of the command."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import yaml

from cli import plots
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


def settings_file(path: str | None) -> dict[str, Any]:
    """Of a YAML or JSON file; nothing where there is none. Raises ClickException for what is no mapping of names."""
    if not path:
        return {}
    try:
        found = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.ClickException(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise click.ClickException(f"--config {path}: there is no mapping of settings in it")
    return found


def plain(text: str, name: str) -> Any:
    """A value as YAML has it. Raises BadParameter."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise click.BadParameter(f"{name}: {text!r} is no value") from None


def plottable(path: str | None) -> None:
    """Raises ClickException where no plot could be written to ``path`` in the end."""
    try:
        plots.require(path or "")
    except MooncakeError as error:
        raise click.ClickException(str(error)) from None
