"""Tiny models, made once a run, and what ``transformers`` itself generates with them."""

from __future__ import annotations

import shared.engines.transformers  # noqa: F401 - first: it sets how threads wait, before torch is imported

# isort: split

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.blocks import Tokens
from shared.engines.private_pool import anonymous_pool
from shared.engines.tiny import Family, make_tiny_model
from shared.engines.transformers import TransformersEngine

B = 16
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "mistral")
Reference = Callable[[str, Tokens, int], list[int]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    @cache
    def make(family: Family) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp(family) / "model", family=family, vocabulary="small")

    return make


@pytest.fixture(scope="session")
def load(tiny: Callable[[Family], Path]) -> Callable[..., TransformersEngine]:
    """Engines by family and dtype, shared by all tests: each test binds its own pool."""

    @cache
    def engine(family: Family, dtype: str = "float32") -> TransformersEngine:
        return TransformersEngine(tiny(family), dtype=dtype, block_size=B)

    return engine


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest, load: Callable[..., TransformersEngine]) -> Iterator[TransformersEngine]:
    found = load(request.param)
    yield found
    found.unbind()


@pytest.fixture
def llama(load: Callable[..., TransformersEngine]) -> Iterator[TransformersEngine]:
    found = load("llama")
    yield found
    found.unbind()


@pytest.fixture
def bound(engine: TransformersEngine) -> Iterator[TransformersEngine]:
    """An engine over a private pool of 128 slots."""
    with anonymous_pool(engine.namespace.geometry, 128) as pool:
        engine.bind(pool)
        yield engine


@pytest.fixture(scope="session")
def model(tiny: Callable[[Family], Path]) -> Callable[..., Any]:
    """The library's own model, untouched by us."""

    @cache
    def plain(family: Family, dtype: str = "float32") -> Any:
        return AutoModelForCausalLM.from_pretrained(tiny(family), dtype=getattr(torch, dtype)).eval()

    return plain


@pytest.fixture(scope="session")
def reference(model: Callable[..., Any]) -> Reference:
    """What ``generate`` of the unmodified model says, greedy, without stopping at EOS."""

    def generate(family: str, prompt: Tokens, count: int) -> list[int]:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        out = model(family).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return generate


@pytest.fixture(scope="session")
def prompts() -> Callable[[int, int], Tokens]:
    """A seeded random prompt of a length."""

    def prompt(length: int, seed: int = 0) -> Tokens:
        return np.random.default_rng((seed, length)).integers(3, 250, length).astype(np.uint32)

    return prompt
