"""What reuse costs and spares (the paper, section 2.2): bytes of KV, floating point operations, Eq. 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder. ``gqa``: query heads per KV head; ``value_bytes``: of one number; ``attention``, ``linear``:
    the paper's a and b, operations per token pair and per token in units of d and d²."""

    layers: int
    hidden: int
    gqa: int
    value_bytes: int = 2
    attention: float = 4.0
    linear: float = 22.0

    @property
    def bytes_per_token(self) -> int:
        """KV of one token, all layers."""
        return self.layers * 2 * self.hidden // self.gqa * self.value_bytes

    def flops(self, tokens: int) -> float:
        """Operations of a prefill (Eq. 1; attention without its causal half, as there)."""
        d = float(self.hidden)
        return self.layers * (self.attention * tokens**2 * d + self.linear * tokens * d**2)

    def break_even(self, prefix: int, operations: float) -> float:
        """Bytes per second above which loading ``prefix`` tokens beats computing them with ``operations`` a second
        (Eq. 2)."""
        return self.bytes_per_token * prefix * operations / self.flops(prefix)


LLAMA3_70B = ModelShape(layers=80, hidden=8192, gqa=8)
A800_NODE = 8 * 312e12
"""Peak dense BF16 operations per second of eight A800."""
H800_NODE = 8 * 989e12
