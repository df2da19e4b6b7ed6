"""Floating point operations of a model, from its configuration; and when reuse pays, the paper's Eq. 2. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shared.errors import ConfigError
from shared.latency import PrefillModel
from shared.model_info import model_info, read_json

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
UNGATED = frozenset({"gpt2", "gpt_neox", "opt", "bloom", "gptj", "codegen", "falcon", "phi", "starcoder2"})
"""Types of models whose feed-forward layers have two matrices; all others have a gate besides."""


class Flops(NamedTuple):
    """``token``: of one token in all matrices of all layers. ``pair``: of a query and a key that it attends to, in all
    layers. ``head``: of the logits of one position."""

    token: float
    pair: float
    head: float

    def prefill(self, n: int, p: int) -> float:
        """A prompt of ``n`` tokens, ``p`` of them cached; each attends to itself and to those before it alone."""
        pairs = (n * (n + 1) - p * (p + 1)) / 2
        return self.token * (n - p) + self.pair * pairs + self.head

    def decode(self, batch: int, kv_tokens: int) -> float:
        return (self.token + self.head) * batch + self.pair * kv_tokens


def model_flops(folder: Path) -> Flops:
    """A multiplication and an addition are two. Raises ConfigError for a model of experts, or one that does not say how
    wide its layers are."""
    info, config = model_info(folder), read_json(folder / "config.json")
    if any(config.get(name) for name in EXPERTS):
        raise ConfigError("what a token costs in a model of experts depends on where it goes", field="model")
    hidden = config.get("hidden_size") or config.get("n_embd")
    heads = config.get("num_attention_heads") or config.get("n_head")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        raise ConfigError("config.json sets no hidden_size or num_attention_heads", field="model")
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    attention = 2 * hidden * info.head_dim * (heads + info.kv_heads)
    forward = (2 if info.model_type in UNGATED else 3) * hidden * inner
    return Flops(
        token=2.0 * info.layers * (attention + forward),
        pair=4.0 * info.layers * heads * info.head_dim,
        head=2.0 * hidden * info.vocab_size,
    )


def reuse_pays_above(model: PrefillModel, prefix: int, kv_bytes: int) -> float:
    """Bytes per second of a link from which on loading ``prefix`` cached tokens of ``kv_bytes`` each takes less time
    than computing them: the paper's Eq. 2, with measured times in place of operations over a peak. ``inf`` where
    computing is free."""
    saved = model.seconds(prefix, 0) - model.base
    return prefix * kv_bytes / saved if saved > 0 else float("inf")


def shortest_paying_prefix(model: PrefillModel, kv_bytes: int, rate: float, longest: int) -> int | None:
    """The least number of tokens whose KV is better loaded at ``rate`` bytes per second than computed; None where that
    is none up to ``longest``. From it on all are: a token costs the more to compute, the later it comes."""
    if reuse_pays_above(model, longest, kv_bytes) > rate:
        return None
    low, high = 1, longest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reuse_pays_above(model, middle, kv_bytes) <= rate else (middle + 1, high)
    return low
