"""What the simulated engine answers: words drawn by a hash, the same ones everywhere. Pure, numpy only."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from shared.blocks import Tokens
from shared.engines.base import Draw, Drawn
from shared.engines.simulated_kv import Words, mix
from shared.errors import ConfigError
from shared.messages import Logprob
from shared.model_info import read_json

WORD = re.compile(r"[Ġ▁ ]?[A-Za-z]+")  # with the marks for a space of byte-level and of sentencepiece vocabularies
CERTAIN = 100.0
"""A bias from here on forces its token, as it does with a model."""

FIRST, RATIO = 0.6, 0.35
"""Probability of the most likely token, and of each next one against the one before: together below 1."""


def plain_tokens(folder: Path, without: frozenset[int]) -> Tokens:
    """Ids of a vocabulary that are whole ASCII words, in order: any sequence of them is clean text. Raises ConfigError
    where ``tokenizer.json`` of the model folder has none."""
    tokenizer = read_json(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    pieces = vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))
    added = {int(token["id"]) for token in tokenizer.get("added_tokens", ())}
    plain = sorted(i for piece, i in pieces if WORD.fullmatch(piece) and i not in added and i not in without)
    if not plain:
        raise ConfigError(f"{folder / 'tokenizer.json'} has no words to answer with", field="model")
    return np.array(plain, dtype=np.uint32)


def draw_all(draws: list[Draw], states: Words, plain: Tokens) -> list[Drawn]:
    """Draw ``i`` is a function of the state it follows, its position and choice, and, unless it is greedy, its seed."""
    seeds = [d.sampling.seed % 2**64 if d.sampling.temperature else 0 for d in draws]
    places = [(d.choice << 32) + d.position + 1 for d in draws]
    hashes = mix(states ^ mix(np.array(seeds, np.uint64) + mix(np.array(places, np.uint64))))
    picks = (hashes % np.uint64(len(plain))).astype(np.int64)
    return [_drawn(d, int(pick), plain) for d, pick in zip(draws, picks, strict=True)]


def _drawn(draw: Draw, pick: int, plain: Tokens) -> Drawn:
    sampling = draw.sampling
    forced = _forced(draw) if sampling.logit_bias else None
    token = int(plain[pick]) if forced is None else forced
    if sampling.logprobs < 0:
        return Drawn(token)
    count = min(sampling.logprobs, len(plain))
    others = (int(plain[(pick + step) % len(plain)]) for step in range(1, count + 1))
    ranked = [token, *(other for other in others if other != token)][:count]
    return Drawn(token, logprob(0), tuple(Logprob(other, logprob(rank)) for rank, other in enumerate(ranked)))


def logprob(rank: int) -> float:
    """Natural logarithm of the probability of the token of that rank (0: the most likely)."""
    return float(np.log(FIRST) + rank * np.log(RATIO))


def _forced(draw: Draw) -> int | None:
    """The token that a bias makes certain, None where there is none. Before ``min_tokens`` nothing ends the answer."""
    sampling = draw.sampling
    banned = set(sampling.stop_ids) if draw.position < sampling.min_tokens else set[int]()
    biased = [(bias, -token) for token, bias in sampling.logit_bias.items() if bias >= CERTAIN and token not in banned]
    return -max(biased)[1] if biased else None
