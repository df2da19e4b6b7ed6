"""Drawing a token from logits. Pure: the same logits, settings and position give the same token in every process.

Order: bias, minimum length and penalties on the logits; temperature; then min_p, top_k and top_p narrow what may
be drawn. Tokens with equal logits are kept or dropped together, so that no result depends on the order of a sort.
Log-probabilities are those of the model, before any of it.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from shared.engines.base import Draw, Drawn
from shared.messages import Logprob, Sampling

Logits = npt.NDArray[np.float32]

FIRST_GUESS = 256  # most nuclei are smaller: sorting these instead of the vocabulary is exact whenever they suffice


def finish_reason(sampling: Sampling, token: int, index: int) -> str:
    """Why the output ends with ``token`` drawn at ``index`` (from 0): "stop", "length", or "" when it goes on."""
    if token in sampling.stop_ids and index >= sampling.min_tokens:
        return "stop"
    return "length" if index + 1 >= sampling.max_tokens else ""


def uniforms(seed: int, choice: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """``count`` numbers in (0, 1), one a token id: the raw bits of a generator seeded by (seed, choice, position),
    which numpy keeps the same from version to version."""
    packed = struct.pack("<QQQ", seed % 2**64, choice, position)
    generator = np.random.PCG64(int.from_bytes(hashlib.blake2b(packed, digest_size=16).digest(), "little"))
    bits = np.asarray(generator.random_raw(count), dtype=np.uint64) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def is_plain_greedy(draw: Draw) -> bool:
    """True when the answer is the largest logit and nothing else is asked for."""
    return draw.sampling.temperature == 0 and draw.sampling.logprobs < 0 and not _changes(draw)


def draw(logits: Logits, what: Draw) -> Drawn:
    """Draw from ``logits`` ``[vocabulary]``, which are not changed."""
    sampling = what.sampling
    row = np.nan_to_num(logits, nan=-np.inf) if np.isnan(logits.max()) else logits
    adjusted = adjust(row, what) if _changes(what) else row
    if sampling.temperature == 0:
        token = int(adjusted.argmax())
    else:
        chances = uniforms(sampling.seed, what.choice, what.position, len(adjusted))
        token = _race(probabilities(adjusted, sampling), chances)
    if sampling.logprobs < 0:
        return Drawn(token)
    return _with_logprobs(row, token, sampling.logprobs)


def adjust(logits: Logits, what: Draw) -> Logits:
    """A copy with bias, minimum length and penalties applied."""
    sampling = what.sampling
    row: Logits = logits.copy()
    outputs = _ids(what.outputs)
    if sampling.repetition_penalty != 1.0:
        seen = np.union1d(_ids(what.prompt), outputs)
        values = row[seen]
        row[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if len(outputs) and (sampling.frequency_penalty or sampling.presence_penalty):
        ids, counts = np.unique(outputs, return_counts=True)
        row[ids] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)
    for token, bias in sampling.logit_bias.items():
        if 0 <= token < len(row):
            row[token] += np.float32(bias)
    if what.position < sampling.min_tokens:
        row[[token for token in sampling.stop_ids if 0 <= token < len(row)]] = -np.inf
    return row


def probabilities(logits: Logits, sampling: Sampling) -> npt.NDArray[np.float64]:
    """What may be drawn, not normalized; 0 for what may not. Temperature must be above 0."""
    top = float(logits.max())
    if not np.isfinite(top):
        return np.asarray(logits == top, dtype=np.float64)
    scaled = (logits - np.float32(top)) / np.float32(max(sampling.temperature, 1e-6))
    weights: npt.NDArray[np.float64] = np.exp(scaled).astype(np.float64)
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0.0  # the largest weight is 1
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.partition(weights, -sampling.top_k)[-sampling.top_k]] = 0.0
    if sampling.top_p < 1:
        weights[weights < _nucleus(weights, sampling.top_p)] = 0.0
    return weights


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> float:
    """The smallest weight of the fewest largest weights whose sum reaches ``top_p`` of the total."""
    goal, count = top_p * float(weights.sum()), min(FIRST_GUESS, len(weights))
    while True:
        largest = np.sort(np.partition(weights, -count)[-count:])[::-1]
        reached = np.cumsum(largest)
        if reached[-1] >= goal or count == len(weights):
            return float(largest[min(int(np.searchsorted(reached, goal)), count - 1)])
        count = min(8 * count, len(weights))


def _race(weights: npt.NDArray[np.float64], chances: npt.NDArray[np.float64]) -> int:
    """The token whose exponential clock of rate ``weight`` rings first: drawn in proportion to the weights.

    Each token has a clock of its own, so a rounding error in one logit can change the draw only where two clocks ring
    at almost the same time. The intervals of a cumulative sum all shift with every such error.
    """
    candidates = np.flatnonzero(weights)
    return int(candidates[np.argmin(-np.log(chances[candidates]) / weights[candidates])])


def _with_logprobs(logits: Logits, token: int, count: int) -> Drawn:
    """``count`` alternatives, most likely first, ties by token id."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - np.log(np.exp(shifted).sum())
    count = min(count, len(logits))
    if count == 0:
        return Drawn(token, float(logprobs[token]))
    least = np.partition(logits, -count)[-count]
    best = sorted(np.flatnonzero(logits >= least).tolist(), key=lambda i: (-logits[i], i))[:count]
    return Drawn(token, float(logprobs[token]), tuple(Logprob(i, float(logprobs[i])) for i in best))


def _changes(what: Draw) -> bool:
    s = what.sampling
    penalized = s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0
    return penalized or bool(s.logit_bias) or (what.position < s.min_tokens and bool(s.stop_ids))


def _ids(tokens: npt.NDArray[np.uint32] | None) -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64) if tokens is None else np.asarray(tokens, dtype=np.int64)
