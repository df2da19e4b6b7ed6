"""A calibration in figures: how well the models fit, how much of the machine is used, and whether reuse pays. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from rich.console import Group, RenderableType

from cli.console import bytes_text, table
from cli.link_rate import LinkRate
from shared.calibration import Calibration
from shared.flops import Flops, reuse_pays_above, shortest_paying_prefix
from shared.latency import DecodeSample, PrefillSample

PREFIXES = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Machine:
    """``flops`` None: they cannot be told of this model. ``peak``: operations per second, None: not known; ``source``
    says where it is from."""

    flops: Flops | None
    peak: float | None
    source: str


def figures(kept: Calibration, machine: Machine, link: LinkRate) -> dict[str, Any]:
    """All that is said, by name; seconds, bytes and operations."""
    prefill = [_prefill_row(kept, machine, sample) for sample in kept.prefill_samples]
    decode = [_decode_row(kept, machine, sample) for sample in kept.decode_samples]
    mfus = [row["mfu"] for row in prefill if row["mfu"] is not None]
    return {
        "engine": kept.subject.engine,
        "model": kept.subject.model,
        "dtype": kept.subject.dtype,
        "threads": kept.subject.threads,
        "device": kept.subject.device,
        "prefill": {"base": kept.prefill.base, "linear": kept.prefill.linear, "square": kept.prefill.square},
        "decode": {
            "base": kept.decode.base,
            "per_sequence": kept.decode.per_sequence,
            "per_token": kept.decode.per_token,
        },
        "prefill_r2": kept.prefill_r2,
        "decode_r2": kept.decode_r2,
        "prefill_error": _spread([row["error"] for row in prefill]),
        "decode_error": _spread([row["error"] for row in decode]),
        "peak_flops": machine.peak,
        "peak_source": machine.source,
        "mfu_max": max(mfus, default=None),
        "prefill_samples": prefill,
        "decode_samples": decode,
        "reuse": _reuse(kept, link),
    }


def _prefill_row(kept: Calibration, machine: Machine, sample: PrefillSample) -> dict[str, Any]:
    n, p, seconds = sample
    work = machine.flops.prefill(n, p) if machine.flops else None
    return {"n": n, "p": p, **_row(kept.prefill.seconds(n, p), seconds, work, machine.peak)}


def _decode_row(kept: Calibration, machine: Machine, sample: DecodeSample) -> dict[str, Any]:
    batch, kv_tokens, seconds = sample
    work = machine.flops.decode(batch, kv_tokens) if machine.flops else None
    row = _row(kept.decode.seconds(batch, kv_tokens), seconds, work, machine.peak)
    return {"batch": batch, "kv_tokens": kv_tokens, **row}


def _row(model: float, seconds: float, work: float | None, peak: float | None) -> dict[str, Any]:
    """``error``: the model's over the measured time, less one."""
    mfu = work / seconds / peak if work and peak and seconds > 0 else None
    return {"seconds": seconds, "model": model, "error": model / seconds - 1 if seconds > 0 else 0.0, "mfu": mfu}


def _spread(errors: list[float]) -> dict[str, float]:
    """Of relative errors: the median of their sizes, and the largest."""
    sizes = sorted(abs(error) for error in errors)
    middle = quantiles(sizes, n=2, method="inclusive")[0] if len(sizes) > 1 else sizes[0]
    return {"median": middle, "max": sizes[-1]}


def _reuse(kept: Calibration, link: LinkRate) -> dict[str, Any]:
    pays = shortest_paying_prefix(kept.prefill, kept.kv_bytes, link.rate, 1 << 24)
    needed = {str(p): reuse_pays_above(kept.prefill, p, kept.kv_bytes) for p in PREFIXES}
    return {
        "kv_bytes_per_token": kept.kv_bytes,
        "link_rate": link.rate,
        "link_source": link.source,
        "pays_from_tokens": pays,
        "rate_needed": {p: None if rate == float("inf") else rate for p, rate in needed.items()},
    }


# -- for people ----------------------------------------------------------------------------------------------------


def calibration_table(found: dict[str, Any]) -> RenderableType:
    prefill = table((), ("prompt", "cached", "s", "model s", "error", "MFU"), title="Prefill")
    for row in found["prefill_samples"]:
        prefill.add_row(str(row["n"]), str(row["p"]), *_cells(row))
    decode = table((), ("batch", "tokens attended to", "s", "model s", "error", "MFU"), title="Decode step")
    for row in found["decode_samples"]:
        decode.add_row(str(row["batch"]), str(row["kv_tokens"]), *_cells(row))
    return Group("", prefill, "", decode, "", *sentences(found))


def _cells(row: dict[str, Any]) -> list[str]:
    mfu = "-" if row["mfu"] is None else f"{100 * row['mfu']:.0f} %"
    return [f"{row['seconds']:.4g}", f"{row['model']:.4g}", f"{100 * row['error']:+.0f} %", mfu]


def sentences(found: dict[str, Any]) -> list[str]:
    """The models, how well they fit, and the answer of Eq. 2."""
    p, d, reuse = found["prefill"], found["decode"], found["reuse"]
    pe, de = found["prefill_error"], found["decode_error"]
    said = [
        f"Prefill of n tokens, p cached: {p['base']:.3g} + {p['linear']:.3g} (n-p) + {p['square']:.3g} (n²-p²) s; "
        f"R² {found['prefill_r2']:.4f}, {_error_text(pe)}",
        f"Decode step: {d['base']:.3g} + {d['per_sequence']:.3g} batch + {d['per_token']:.3g} tokens s; "
        f"R² {found['decode_r2']:.4f}, {_error_text(de)}",
    ]
    if found["mfu_max"] is not None:
        peak = f"{found['peak_flops'] / 1e9:.4g} GFLOP/s ({found['peak_source']})"
        said.append(f"MFU: up to {100 * found['mfu_max']:.0f} % of {peak}")
    else:
        said.append(f"MFU: not known ({found['peak_source']})")
    return [*said, _eq2(reuse)]


def _error_text(error: dict[str, float]) -> str:
    return f"error {100 * error['median']:.1f} % in the median, {100 * error['max']:.0f} % at most"


def _eq2(reuse: dict[str, Any]) -> str:
    rate, pays = f"{bytes_text(reuse['link_rate'])}/s ({reuse['link_source']})", reuse["pays_from_tokens"]
    token = f"{bytes_text(reuse['kv_bytes_per_token'])} of KV a token"
    needed = ", ".join(
        f"{int(p):,} tokens {bytes_text(value)}/s" for p, value in reuse["rate_needed"].items() if value is not None
    )
    if pays is None:
        answer = f"Reuse does not pay over {rate} with {token}"
    elif pays == 1:
        answer = f"Reuse pays over {rate} with {token}: loading any prefix takes less time than computing it"
    else:
        answer = f"Reuse pays over {rate} with {token} from {pays:,} tokens of prefix on"
    return f"{answer}; the link must be faster than: {needed}" if needed else answer
