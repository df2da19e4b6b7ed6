"""No text has fewer tokens than is said, and where nothing is known nothing is said."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from services.conductor.gateway.ask import ask_completion
from services.conductor.gateway.body import CompletionBody, decode_body
from services.conductor.gateway.density import Density
from services.conductor.gateway.prompts import Limits, prepare
from services.conductor.gateway.tokenizer import Tokenizer
from shared.blocks import Namespace, Tokens
from shared.errors import ContextLengthExceeded

NAMESPACE = Namespace(
    model="m", weights="w", tokenizer="t", dtype="float32", layers=1, kv_heads=1, head_dim=4, block_size=32
)
MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "abc"), ("Ã", "¤")]


def byte_level() -> Library:
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    library = Library(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<end of text>", normalized=False)])
    return library


@given(st.text(st.sampled_from(string.printable + "ä🗼"), max_size=60) | st.just("<end of text>" * 3))
def test_no_text_has_fewer_tokens(text: str) -> None:
    library = byte_level()
    assert Density(library).fewest(text) <= len(library.encode(text).ids)
    assert Density(library).fewest(text) >= len(text) / len("<end of text>")


@given(st.text(st.sampled_from("ab ä"), max_size=60))
def test_bytes_without_a_token_do_not_count(text: str) -> None:
    library = byte_level()
    library.model = models.BPE({"a": 0, "b": 1, "Ġ": 2, "ab": 3}, [("a", "b")])
    assert Density(library).fewest(text) <= len(library.encode(text).ids)


def change(what: str) -> Library:
    library = byte_level()
    changes: dict[str, Any] = {
        "normalizer": lambda: setattr(library, "normalizer", normalizers.Strip()),
        "removed": lambda: setattr(library, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        "spaces": lambda: library.add_tokens([AddedToken("<mask>", lstrip=True)]),
        "decoder": lambda: setattr(library, "decoder", decoders.WordPiece()),
        "model": lambda: setattr(library, "model", models.WordLevel({"a": 0}, unk_token="a")),
    }
    changes[what]()
    return library


@pytest.mark.parametrize("what", ["normalizer", "removed", "spaces", "decoder", "model"])
def test_nothing_is_said_where_text_may_get_lost(what: str) -> None:
    assert Density(change(what)).fewest("a" * 1000) == 0


@pytest.mark.parametrize("body", [{"prompt": "a" * 9000}, {"prompt": ["b", "a" * 9000]}])
def test_a_prompt_far_too_long_is_refused_before_it_is_tokenized(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(byte_level(), None, frozenset())
    ask = ask_completion(decode_body(json.dumps({"model": "m", **body}).encode(), CompletionBody))
    counted: list[int] = []
    text = tokenizer.text

    def count(prompt: str, **more: Any) -> Tokens:
        counted.append(len(prompt))
        return text(prompt, **more)

    monkeypatch.setattr(tokenizer, "text", count)
    with pytest.raises(ContextLengthExceeded, match="context length is 512 tokens, but your prompt has at least 693"):
        prepare(ask, tokenizer, NAMESPACE, Limits(512, 64))
    assert 9000 not in counted
