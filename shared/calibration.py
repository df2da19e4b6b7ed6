"""A calibration as a file keeps it: an engine's latency models, what they were measured of, and how well they fit."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.errors import MALFORMED, ConfigError
from shared.latency import DecodeModel, DecodeSample, PrefillModel, PrefillSample

FIELD = "latency_model"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. ``weights``: fingerprint of the model's weights."""

    engine: str
    model: str
    weights: str
    dtype: str
    threads: int
    device: str

    def difference(self, other: Subject) -> str:
        """``threads: 1, not 2``, for whatever of it changes the time of a step; "" when nothing does."""
        for name in ("engine", "weights", "dtype", "threads", "device"):
            if (mine := getattr(self, name)) != (theirs := getattr(other, name)):
                return f"{name}: {theirs}, not {mine}"
        return ""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_bytes``: of one token. ``chunk``: tokens of a prefill step. ``r2`` of the models on their own samples."""

    subject: Subject
    prefill: PrefillModel
    decode: DecodeModel
    kv_bytes: int
    chunk: int
    prefill_r2: float
    decode_r2: float
    prefill_samples: list[PrefillSample]
    decode_samples: list[DecodeSample]


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """Raises OSError."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")


def read_calibration(path: str | Path) -> Calibration:
    """Raises ConfigError for a file that is none."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"latency_model: {path}: {error.strerror or error}", field=FIELD) from None
    except MALFORMED as error:
        raise ConfigError(f"latency_model: {path} is no file of `mooncake calibrate`: {error}", field=FIELD) from None


def latency_models(path: str, subject: Subject) -> tuple[PrefillModel, DecodeModel]:
    """The models of the file. Raises ConfigError where they were measured of something else than ``subject``."""
    kept = read_calibration(path)
    if difference := subject.difference(kept.subject):
        raise ConfigError(f"latency_model: {path} was measured with {difference}", field=FIELD)
    return kept.prefill, kept.decode
