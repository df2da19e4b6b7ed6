"""Plots of a calibration: what was measured against the models, their errors, and the link on which reuse pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cli.plots import figure
from shared.calibration import Calibration
from shared.flops import reuse_pays_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = 60


def plot_calibration(path: str, kept: Calibration, found: dict[str, Any]) -> None:
    """Writes four panels to ``path``."""
    with figure(path, 2, 2) as axes:
        _prefill(axes[0][0], kept)
        _decode(axes[0][1], kept)
        _errors(axes[1][0], found)
        _reuse(axes[1][1], kept, found["reuse"])


def _geometric(low: float, high: float) -> list[float]:
    ratio = (high / low) ** (1 / STEPS)
    return [low * ratio**i for i in range(STEPS + 1)]


def _prefill(axes: Axes, kept: Calibration) -> None:
    """By length; a colour for each cached share."""
    axes.set(xlabel="tokens of the prompt", ylabel="prefill (s)", xscale="log", yscale="log")
    lengths = [sample.n for sample in kept.prefill_samples]
    shares = (0.0, 0.5, 0.875)
    for number, share in enumerate(shares):
        colour = f"C{number}"
        dots = [s for s in kept.prefill_samples if _nearest(s.p / s.n, shares) == share]
        axes.plot([s.n for s in dots], [s.seconds for s in dots], "o", color=colour, label=f"{100 * share:g} % cached")
        curve = _geometric(min(lengths), max(lengths))
        axes.plot(curve, [kept.prefill.seconds(round(n), round(share * n)) for n in curve], color=colour)
    axes.legend(loc="upper left")
    axes.set_title(f"prefill: measured, and model (R² {kept.prefill_r2:.4f})", fontsize=10)


def _nearest(share: float, shares: Sequence[float]) -> float:
    return min(shares, key=lambda one: abs(one - share))


def _decode(axes: Axes, kept: Calibration) -> None:
    """By batch; a colour for each context."""
    axes.set(xlabel="sequences in the batch", ylabel="decode step (s)", xscale="log", yscale="log")
    contexts = sorted({s.kv_tokens // s.batch for s in kept.decode_samples})
    for number, context in enumerate(contexts):
        dots = [s for s in kept.decode_samples if s.kv_tokens // s.batch == context]
        batches = [s.batch for s in dots]
        axes.plot(batches, [s.seconds for s in dots], "o", color=f"C{number}", label=f"{context} tokens each")
        model = [kept.decode.seconds(batch, batch * context) for batch in batches]
        axes.plot(batches, model, color=f"C{number}")
    axes.legend(loc="upper left", fontsize=8)
    axes.set_title(f"decode: measured, and model (R² {kept.decode_r2:.4f})", fontsize=10)


def _errors(axes: Axes, found: dict[str, Any]) -> None:
    axes.set(xlabel="measured (s)", ylabel="model over measured, less 1 (%)", xscale="log")
    for name, marker in (("prefill", "o"), ("decode", "s")):
        rows = found[f"{name}_samples"]
        axes.plot([r["seconds"] for r in rows], [100 * r["error"] for r in rows], marker, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.legend(loc="best")
    axes.set_title("residuals", fontsize=10)


def _reuse(axes: Axes, kept: Calibration, reuse: dict[str, Any]) -> None:
    """The link rate from which on loading a prefix beats computing it (Eq. 2), and the rate that there is."""
    axes.set(xlabel="tokens of the prefix", ylabel="bytes per second", xscale="log", yscale="log")
    prefixes = [round(p) for p in _geometric(64, 131072)]
    needed = [reuse_pays_above(kept.prefill, p, kept.kv_bytes) for p in prefixes]
    axes.plot(prefixes, needed, label="reuse pays above")
    axes.axhline(reuse["link_rate"], color="tab:red", linestyle="--", label=f"this link: {reuse['link_rate']:.3g} B/s")
    axes.legend(loc="best")
    axes.set_title("does reuse pay? (Eq. 2, with measured times)", fontsize=10)
