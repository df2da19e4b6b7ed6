"""The embedded engine: an unmodified ``transformers`` causal model whose attention works on the store's pool.

Importing this module sets how OpenMP threads wait, unless torch was imported before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads of several services ruin each other

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging

from shared.blocks import Namespace
from shared.engines.attention import NAME, PagedStep, paged_attention
from shared.engines.base import Drawn, LayerHook, PoolMap, Work
from shared.engines.packed import pack
from shared.engines.plan import Plan
from shared.engines.pool import DTYPES, KVPool, check_geometry
from shared.engines.sampling import draw, is_plain_greedy
from shared.errors import ConfigError, MooncakeError
from shared.fingerprint import canonical_dtype, model_namespace
from shared.model_info import ModelInfo, model_info
from shared.telemetry import log

AttentionInterface.register(NAME, paged_attention)  # no mask function of that name: models build no mask

logger = log("engine")

PROBE_TOKENS = 8
TOGETHER = 2 << 20
"""Bytes of a layer's KV that rows attend to at once: what is gathered is to be in the core's cache when it is read."""
STANDARD_LAYERS = {"full_attention", "sliding_attention", "attention"}


class TransformersEngine:
    """A model of a Hugging Face folder, on one device. See :class:`shared.engines.base.Engine`.

    Owns the weights until it is collected, and the mapping of the pool between ``bind`` and ``unbind``. Any
    decoder-only model with standard KV works; others are refused with ConfigError when loaded.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        block_size: int = 32,
        threads: int = 1,
        device: str = "cpu",
        name: str = "",
    ) -> None:
        folder = Path(path)
        self.name = name or folder.name
        self.info: ModelInfo = model_info(folder)
        self._namespace = model_namespace(folder, dtype=canonical_dtype(dtype), block_size=block_size)
        self._dtype = DTYPES[self._namespace.dtype]
        self._threads = threads
        self._thread = 0
        self._use_threads()
        try:
            self._device = torch.device(device)
            torch.empty(0, device=self._device)
        except (RuntimeError, AssertionError) as e:
            raise ConfigError(f"device {device!r} cannot be used: {e}", field="device") from e
        self._pool: KVPool | None = None
        self.packed = False
        self._start(folder)

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def context_length(self) -> int:
        return self.info.context_length

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.info.eos_ids

    @property
    def layers(self) -> int:
        return self.info.layers

    def bind(self, pool: PoolMap) -> None:
        check_geometry(pool, self._namespace.geometry)
        self._pool = KVPool.mapped(pool)

    def unbind(self) -> None:
        self._pool = None

    def step(self, batch: Sequence[Work], on_layer: LayerHook | None = None) -> list[Drawn | None]:
        if self._pool is None:
            raise ConfigError("the engine is bound to no pool", field="pool")
        if not batch:
            return []
        self._use_threads()
        plan = self._plan(batch, self.context_length)
        return _draw(batch, self._forward(plan, self._pool, on_layer))

    def _plan(self, batch: Sequence[Work], limit: int) -> Plan:
        geometry = self._namespace.geometry
        together = max(1, TOGETHER // geometry.layer_bytes)
        return Plan(batch, geometry.block_size, limit, self.info.vocab_size, self._dtype, together)

    @torch.inference_mode()
    def _forward(self, plan: Plan, pool: KVPool, on_layer: LayerHook | None = None) -> Tensor:
        """Logits ``[rows that draw][vocabulary]``."""
        out = self._model(
            input_ids=plan.tokens.to(self._device),
            position_ids=plan.positions.to(self._device),
            use_cache=False,
            logits_to_keep=plan.drawing.to(self._device),
            paged=PagedStep(plan, pool, on_layer),
        )
        logits: Tensor = out.logits[0]
        return logits

    def _use_threads(self) -> None:
        """OpenMP counts threads per calling thread; the one that steps need not be the one that loaded."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            torch.set_num_threads(self._threads)

    def _start(self, folder: Path) -> None:
        """Load and try; a model that does not run on packed weights runs without."""
        self._model = _load(folder, self._dtype, self._device)
        try:
            self._probe(packing=True)
        except ConfigError as e:
            if not self.packed:
                raise
            logger.warning("weights are not packed: the model computes something else with that", why=e.message)
            self._model = _load(folder, self._dtype, self._device)
            self._probe(packing=False)

    def _probe(self, packing: bool) -> None:
        """Run a few tokens through the model as it is and through ours: raises ConfigError unless every layer used
        the paged attention once, with the KV geometry of the namespace, and the logits agree."""
        geometry = self._namespace.geometry
        tokens = np.arange(1, PROBE_TOKENS + 1, dtype=np.uint32) % self.info.vocab_size
        pool = KVPool.private(geometry, geometry.blocks(PROBE_TOKENS))
        layers: list[int] = []
        try:
            with torch.inference_mode():
                ids = torch.from_numpy(tokens.astype(np.int64))[None].to(self._device)
                expected = self._model(input_ids=ids, use_cache=False).logits[0]
            self.packed = packing and pack(self._model)
            self._model.set_attn_implementation(NAME)
            plan = self._plan([Work(tokens, 0, range(pool.slots))], PROBE_TOKENS)
            plan.drawing = torch.arange(PROBE_TOKENS)
            found = self._forward(plan, pool, layers.append)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as e:
            raise ConfigError(f"{self.name} does not run over paged KV: {e}", field="model") from e
        except MooncakeError as e:
            raise ConfigError(f"{self.name}: {e.message}", field="model") from e
        if layers != list(range(geometry.layers)):
            raise ConfigError(f"{self.name} does not keep KV once per layer (layers seen: {layers})", field="model")
        if not _agree(found, expected):
            raise ConfigError(f"{self.name} attends in a way that paged attention does not support", field="model")


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    logging.disable_progress_bar()
    logging.disable_default_handler()
    logging.enable_propagation()  # what it has to say looks like everything else in our logs
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as e:
        raise ConfigError(f"{folder} cannot be loaded as a causal language model: {e}", field="model") from e
    kinds = set(getattr(model.config, "layer_types", None) or ()) - STANDARD_LAYERS
    if kinds:
        raise ConfigError(f"{folder.name} has layers without standard KV: {', '.join(sorted(kinds))}", field="model")
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{model.config.model_type} models take no attention function", field="model")
    return model.eval().requires_grad_(False).to(device)


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Equal but for the order of floating-point sums."""
    tolerance = 1e-3 if found.dtype == torch.float32 else 0.1
    scale = float(expected.abs().max()) or 1.0
    return bool(((found - expected).abs().max() <= tolerance * scale).item())


def _draw(batch: Sequence[Work], logits: Tensor) -> list[Drawn | None]:
    """Draw for the work that asks for it; plain greedy rows in one call, without copying the logits."""
    draws = [work.draw for work in batch if work.draw is not None]
    if not draws:
        return [None] * len(batch)
    best = logits.argmax(-1).tolist()
    drawn = iter(
        Drawn(best[i]) if is_plain_greedy(d) else draw(logits[i].float().cpu().numpy(), d) for i, d in enumerate(draws)
    )
    return [None if work.draw is None else next(drawn) for work in batch]
