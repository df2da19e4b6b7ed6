"""Latency models: how long a prefill, a transfer and a decode step take. Plain coefficients that travel in records."""

from __future__ import annotations

import msgspec


class PrefillModel(msgspec.Struct, frozen=True):
    """Seconds to prefill a prompt of n tokens of which p are cached: base + linear*(n-p) + square*(n^2-p^2)."""

    base: float
    linear: float
    square: float

    def seconds(self, n: int, p: int) -> float:
        return self.base + self.linear * (n - p) + self.square * (n * n - p * p)


class DecodeModel(msgspec.Struct, frozen=True):
    """Seconds of one decode step: base + per_sequence*batch + per_token*kv_tokens."""

    base: float
    per_sequence: float
    per_token: float

    def seconds(self, batch: int, kv_tokens: int) -> float:
        return self.base + self.per_sequence * batch + self.per_token * kv_tokens
