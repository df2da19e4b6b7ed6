"""The answers to one request: ``n`` to each prompt, of which the first computes it for the others. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from services.conductor.gateway.prompts import Prepared
from services.conductor.generation import Generation, Siblings


def fan_out(prepared: Sequence[Prepared], n: int) -> list[Prepared]:
    """Choice ``i * n + j`` is answer ``j`` to prompt ``i``."""
    return [_choice(prompt, number) for prompt in prepared for number in range(n)]


def related(generations: Sequence[Generation], n: int) -> list[Generation]:
    """Those of one prompt know of each other, so that one instance computes it for all."""
    if n == 1:
        return list(generations)
    shared = [Siblings() for _ in generations[::n]]
    return [replace(generation, siblings=shared[choice // n]) for choice, generation in enumerate(generations)]


def leader(choice: int, n: int) -> int:
    """The choice that computes the prompt of ``choice``; perhaps itself."""
    return choice - choice % n


def derived_seed(seed: int, number: int) -> int:
    """Of answer ``number`` to a prompt: the request's own for the first, so that asking for more does not change it."""
    if not number:
        return seed
    digest = hashlib.blake2b(struct.pack("<qQ", seed, number), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _choice(prompt: Prepared, number: int) -> Prepared:
    if not number:
        return prompt
    seed = derived_seed(prompt.sampling.seed, number)
    return replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, seed=seed))
