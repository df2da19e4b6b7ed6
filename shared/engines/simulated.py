"""The simulated engine: computes nothing, takes the time that a model would, and writes real bytes into the pool.

Of the model folder it reads configuration and tokenizer, no weights. Its tokens are plain words, a function of the
prompt; what it finds in the pool that it, or its like on another node, did not write is counted as a mismatch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.blocks import ITEMSIZE, Namespace, Tokens
from shared.engines.base import Draw, Drawn, LayerHook, PoolMap, Work
from shared.engines.simulated_draw import draw_all, plain_tokens
from shared.engines.simulated_kv import ROOT, WORD, Index, SimulatedPool, Words, mix, shares, states
from shared.errors import ConfigError, InvalidInput
from shared.fingerprint import canonical_dtype, config_fingerprint, tokenizer_fingerprint
from shared.latency import DecodeModel, PrefillModel
from shared.model_info import ModelInfo, model_info
from shared.telemetry import counter, log

CHECK_EVERY = 16
"""A running sequence has one of its blocks checked in every so many steps; a landed prompt is checked whole, once."""

NO_PREFILL_TIME, NO_DECODE_TIME = PrefillModel(0.0, 0.0, 0.0), DecodeModel(0.0, 0.0, 0.0)
OWN_PREFILL = PrefillModel(2e-4, 1e-7, 0.0)
OWN_DECODE = DecodeModel(2e-4, 1e-5, 0.0)
"""About what this engine itself takes, where the models it follows say less: nothing is free."""

logger = log("engine")


@dataclass(frozen=True)
class Simulation:
    """What is simulated. ``prefill`` and ``decode``: seconds of a prompt and of a step; 0 is as fast as possible.
    ``layers``, ``kv_heads``, ``head_dim``, ``context_length``: 0 takes the model's own."""

    prefill: PrefillModel = NO_PREFILL_TIME
    decode: DecodeModel = NO_DECODE_TIME
    layers: int = 1
    kv_heads: int = 1
    head_dim: int = 2
    context_length: int = 0


class SimulatedEngine:
    """See :class:`shared.engines.base.Engine`. Owns nothing but the mapping of the pool between bind and unbind.

    Raises ConfigError for a folder without configuration or words, or a geometry whose tokens are not whole words of 8
    bytes.
    """

    def __init__(
        self,
        path: str | Path,
        simulation: Simulation | None = None,
        *,
        dtype: str = "float32",
        block_size: int = 32,
        name: str = "",
    ) -> None:
        folder = Path(path)
        self.name = name or folder.name
        self.simulation = simulation or Simulation()
        info = model_info(folder)
        self.namespace = _namespace(folder, info, self.simulation, canonical_dtype(dtype), block_size)
        if self.namespace.geometry.token_bytes % WORD:
            what = f"{self.namespace.geometry.token_bytes} bytes a token and layer are no multiple of {WORD}"
            raise ConfigError(f"simulated KV: {what}", field="simulated_head_dim")
        self.context_length = self.simulation.context_length or info.context_length
        self.eos_ids = info.eos_ids
        self.mismatches = self.steps = 0
        self._vocabulary = info.vocab_size
        self._plain = plain_tokens(folder, info.eos_ids)
        self._pool: SimulatedPool | None = None
        self._counter = counter("simulated_kv_mismatches", "Tokens whose KV was not what the simulated engine writes.")

    @property
    def latency(self) -> tuple[PrefillModel, DecodeModel]:
        """Its own latency models, which nobody has to measure. Never zero, so that more work is never free."""
        return _at_least_prefill(self.simulation.prefill), _at_least_decode(self.simulation.decode)

    def bind(self, pool: PoolMap) -> None:
        self._pool = SimulatedPool(pool, self.namespace.geometry)

    def unbind(self) -> None:
        self._pool = None

    def step(self, batch: Sequence[Work], on_layer: LayerHook | None = None) -> list[Drawn | None]:
        if self._pool is None:
            raise ConfigError("the engine is bound to no pool", field="pool")
        if not batch:
            return []
        began, seconds = time.perf_counter(), self.seconds(batch)
        step = _Step(batch, self._pool, self.context_length, self._vocabulary)
        self.steps += 1
        self._verify(batch, self._pool)
        layers = self._pool.layers
        for layer in range(layers):
            step.write(layer)
            _sleep_until(began + seconds * (layer + 1) / layers)
            if on_layer is not None:
                on_layer(layer)
        draws = [work.draw for work in batch if work.draw is not None]
        drawn = iter(draw_all(draws, step.last[[work.draw is not None for work in batch]], self._plain))
        return [None if work.draw is None else next(drawn) for work in batch]

    def seconds(self, batch: Sequence[Work]) -> float:
        """How long the step takes: that of the decode model for what continues an answer, and for chunks of prompts
        what they add to the prefill model's time, whose base comes with the last chunk."""
        running = [work for work in batch if _continues(work)]
        total = sum(self._chunk_seconds(work) for work in batch if not _continues(work))
        if running:
            total += self.simulation.decode.seconds(len(running), sum(work.start + 1 for work in running))
        return total

    def _chunk_seconds(self, work: Work) -> float:
        model = self.simulation.prefill
        return model.seconds(work.start + len(work.tokens), work.start) - (model.base if work.draw is None else 0.0)

    def _any_block(self, blocks: int) -> int:
        """Another one at every step, in no order that could go along with anything."""
        return int(mix(np.array([self.steps], np.uint64))[0]) % max(blocks, 1)

    def _verify(self, batch: Sequence[Work], pool: SimulatedPool) -> None:
        """What the draws of this step depend on: is it what was written?"""
        wrong = 0
        for work in batch:
            draw = work.draw
            if draw is None or draw.prompt is None or not work.start:
                continue
            if draw.position <= 1:
                wrong += _wrong(pool, work, draw, 0, work.start, self.steps % pool.layers)
            elif work.start % CHECK_EVERY == 0:
                first = self._any_block(work.start // pool.block_size) * pool.block_size
                last = min(first + pool.block_size, work.start)
                wrong += _wrong(pool, work, draw, first, last, self.steps % pool.layers)
        if wrong:
            self.mismatches += wrong
            self._counter.inc(wrong)
            logger.error("KV is not what was written", tokens=wrong)


class _Step:
    """One step's tokens, flattened. ``last[i]`` is the state after work ``i``."""

    def __init__(self, batch: Sequence[Work], pool: SimulatedPool, limit: int, vocabulary: int) -> None:
        self._pool = pool
        slots, offsets, found = list[Index](), list[Index](), list[Words]()
        for i, work in enumerate(batch):
            end = work.start + len(work.tokens)
            if not len(work.tokens) or end > limit or end > len(work.slots) * pool.block_size:
                room = min(limit, len(work.slots) * pool.block_size)
                raise InvalidInput(f"work {i}: positions {work.start} to {end}, there is room for {room}", field="work")
            positions = np.arange(work.start, end)
            slots.append(np.asarray(work.slots)[positions // pool.block_size])
            offsets.append(positions % pool.block_size)
            found.append(states(pool.before(work.slots, work.start), work.tokens, work.start))
        if (highest := max(int(work.tokens.max()) for work in batch)) >= vocabulary:
            raise InvalidInput(f"token {highest} is not in the vocabulary of {vocabulary}", field="tokens")
        self.last: Words = np.array([one[-1] for one in found], np.uint64)
        self._slots, self._offsets = np.concatenate(slots), np.concatenate(offsets)
        self._states: Words = np.concatenate(found)

    def write(self, layer: int) -> None:
        self._pool.write(layer, self._slots, self._offsets, self._states)


def _wrong(pool: SimulatedPool, work: Work, draw: Draw, first: int, last: int, layer: int) -> int:
    """How many of the positions [first, last) do not follow, in the pool, from their predecessor."""
    known = _known(draw, first, last)
    positions = np.arange(first, first + len(known))
    low = max(first - 1, 0)
    reach = np.arange(low, first + len(known))
    there = pool.read(layer, np.asarray(work.slots)[reach // pool.block_size], reach % pool.block_size)
    if not first:
        there = np.concatenate([np.array([ROOT]), there])
    return int(np.count_nonzero(np.diff(there) != shares(known, positions)))


def _known(draw: Draw, first: int, last: int) -> Tokens:
    """Tokens [first, last) of prompt and outputs, as far as the draw names them."""
    assert draw.prompt is not None
    split = len(draw.prompt)
    head = draw.prompt[first:last]
    if draw.outputs is None or last <= split:
        return head
    return np.concatenate([head, draw.outputs[max(first - split, 0) : last - split]])


def _continues(work: Work) -> bool:
    """One token of an answer, or the last one's KV; a prompt's last token is drawn after at position 0."""
    return len(work.tokens) == 1 and work.start > 0 and (work.draw is None or work.draw.position > 0)


def _sleep_until(due: float) -> None:
    if (left := due - time.perf_counter()) > 0:
        time.sleep(left)


def _namespace(folder: Path, info: ModelInfo, simulation: Simulation, dtype: str, block_size: int) -> Namespace:
    """Never that of the model itself: what lies in these blocks is no KV."""
    assert dtype in ITEMSIZE
    return Namespace(
        model=config_fingerprint(folder),
        weights="simulated",
        tokenizer=tokenizer_fingerprint(folder),
        dtype=dtype,
        layers=simulation.layers or info.layers,
        kv_heads=simulation.kv_heads or info.kv_heads,
        head_dim=simulation.head_dim or info.head_dim,
        block_size=block_size,
    )


def _at_least_prefill(model: PrefillModel) -> PrefillModel:
    own = OWN_PREFILL
    return PrefillModel(max(model.base, own.base), max(model.linear, own.linear), model.square)


def _at_least_decode(model: DecodeModel) -> DecodeModel:
    own = OWN_DECODE
    return DecodeModel(max(model.base, own.base), max(model.per_sequence, own.per_sequence), model.per_token)
