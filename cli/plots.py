"""Plots of the commands: matplotlib is an extra, and is asked for before anything is measured."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".svg", ".pdf")


def writable(path: str, field: str) -> None:
    """Raises InvalidInput where no file could be written to ``path`` in the end; "" wants none."""
    folder = Path(path).absolute().parent
    if path and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InvalidInput(f"{folder} is no folder that takes files", field=field)


def require(path: str) -> None:
    """Raises InvalidInput where a plot could not be written to ``path`` in the end; "" wants none."""
    if not path:
        return
    if Path(path).suffix.lower() not in KINDS:
        raise InvalidInput(f"plots are {', '.join(KINDS)}; {path!r} is none of them", field="plot")
    writable(path, "plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("plots need matplotlib: pip install 'mooncake-mesh[plots]'", field="plot")


def _readable(axis: Any) -> None:
    """Labels between powers of ten overlap; where there are not two powers in sight, 1, 2 and 5 are labelled."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if axis.get_scale() != "log":
        return
    low, high = axis.get_view_interval()
    if math.floor(math.log10(high)) - math.ceil(math.log10(low)) < 1:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


@contextlib.contextmanager
def figure(path: str, rows: int, columns: int) -> Iterator[list[list[Axes]]]:
    """A figure of ``rows`` times ``columns`` panels, written to ``path`` at the end. No display is opened."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(5.6 * columns, 3.9 * rows), layout="constrained")
    FigureCanvasAgg(made)
    grid: Any = made.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(True, alpha=0.3)
    yield grid
    for axes in grid.flat:
        for axis in (axes.xaxis, axes.yaxis):
            _readable(axis)
    made.savefig(path, dpi=120)
