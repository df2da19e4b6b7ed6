"""Attention over the pool, as a function that unmodified ``transformers`` models call in place of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.engines.base import LayerHook
from shared.engines.plan import Chunk, Plan, Rows, View
from shared.engines.pool import KVPool
from shared.errors import ConfigError

NAME = "mooncake_paged"
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "alibi", "indices")


@dataclass
class PagedStep:
    """What the attention function needs of one step; travels through the model as a keyword argument, so that
    nothing is global."""

    plan: Plan
    pool: KVPool
    on_layer: LayerHook | None = None


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    paged: PagedStep | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """``query`` [1][heads][tokens][dim], ``key`` and ``value`` [1][kv_heads][tokens][dim] after norms and RoPE.
    Writes the layer's KV to the pool, then attends. Returns ``[1][tokens][heads][dim]``."""
    if paged is None:
        raise ConfigError("the model does not pass keyword arguments on to its attention", field="model")
    _refuse(module, key, value, attention_mask, rest)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    plan, pool = paged.plan, paged.pool
    pool.write(layer, plan.slots, plan.offsets, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if paged.on_layer is not None:
        paged.on_layer(layer)
    out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    view = plan.view(sliding_window or 0)
    for chunk in view.chunks:
        out[chunk.first : chunk.last] = _chunk(chunk, pool, layer, query, key, value, scaling)
    if view.rows:
        _all_rows(view, pool, layer, query[0].transpose(0, 1), key.shape[1], scaling, out)
    return out[None], None


def _chunk(
    chunk: Chunk, pool: KVPool, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """Attention of consecutive tokens of one sequence: ``[tokens][heads][dim]``."""
    q = query[:, :, chunk.first : chunk.last]
    grouped = query.shape[1] != key.shape[1]
    if chunk.slots is None or chunk.mask is None:
        k, v = key[:, :, chunk.first : chunk.last], value[:, :, chunk.first : chunk.last]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    else:
        kv = pool.gather(layer, chunk.slots)[: chunk.keys].to(query.device)
        k, v = kv[:, 0].transpose(0, 1)[None], kv[:, 1].transpose(0, 1)[None]
        mask = chunk.mask.to(query.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def _all_rows(
    view: View, pool: KVPool, layer: int, query: Tensor, kv_heads: int, scaling: float | None, out: Tensor
) -> None:
    """Attention of the single tokens among ``query`` ``[tokens][heads][dim]``, into their places of ``out``."""
    order = None if view.order is None else view.order.to(query.device)
    picked = query if order is None else query.index_select(0, order)
    found = out if order is None else torch.empty_like(picked)
    for rows in view.rows:
        part = picked[rows.first : rows.last]
        found[rows.first : rows.last] = _rows(rows, pool, layer, part, kv_heads, scaling)
    if order is not None:
        out.index_copy_(0, order, found)


def _rows(rows: Rows, pool: KVPool, layer: int, query: Tensor, kv_heads: int, scaling: float | None) -> Tensor:
    """Attention of single tokens ``[rows][heads][dim]`` of as many sequences in one call.

    The queries of a KV head are packed as if they were consecutive tokens: the kernel reads each key once.
    """
    count, heads, dim = query.shape
    kv = pool.gather(layer, rows.slots)
    if rows.unused is not None:
        kv.index_fill_(0, rows.unused, 0)
    kv = kv.view(count, -1, *kv.shape[1:]).to(query.device)
    packed = query.reshape(count, kv_heads, heads // kv_heads, dim)
    mask = None if rows.mask is None else rows.mask.to(query.device)
    k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    return F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scaling).reshape(count, heads, dim)


def _refuse(
    module: torch.nn.Module, key: Tensor, value: Tensor, attention_mask: Tensor | None, rest: dict[str, Any]
) -> None:
    """Raises ConfigError for a kind of attention that this function would compute wrongly."""
    for name in UNSUPPORTED:
        if rest.get(name) is not None:
            raise ConfigError(f"attention with {name} is not supported", field="model")
    if attention_mask is not None:
        raise ConfigError("attention with a mask of the model's own is not supported", field="model")
    if key.shape[-1] != value.shape[-1]:
        raise ConfigError("keys and values of different size (MLA) are not supported", field="model")
    if not getattr(module, "is_causal", True):
        raise ConfigError("attention that is not causal is not supported", field="model")
