"""The bytes of tokens, for each kind of vocabulary; and the objects that show them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from services.conductor.gateway.logprobs import ChatLogprobs, Logprobs, TextLogprobs
from services.conductor.gateway.pieces import Pieces, byte_alphabet
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.gateway.trail import Mark
from shared.messages import Logprob


def sentencepiece() -> Library:
    """As Llama 2 has it: words begin with an underscore, what is unknown falls back to bytes."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "▁the", "b"]
    library = Library(
        models.BPE({word: id for id, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(["<s>"])
    return library


def wordpiece() -> Library:
    library = Library(models.WordPiece({"[UNK]": 0, "a": 1, "the": 2, "##n": 3}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    return library


def test_the_alphabet_of_bytes_is_that_of_the_library() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


@given(st.text(max_size=20))
def test_bytes_of_a_byte_level_vocabulary_join_to_the_text(text: str) -> None:
    library = Library(models.BPE(byte_alphabet(), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    pieces = Pieces(library, frozenset())
    assert b"".join(pieces.data(id) or b"" for id in library.encode(text).ids) == text.encode()


def known(library: Library, word: str) -> int:
    """Id of a word that the vocabulary has."""
    id = library.token_to_id(word)
    assert id is not None
    return id


def test_bytes_and_first_words_of_a_sentencepiece_vocabulary() -> None:
    library = sentencepiece()
    pieces = Pieces(library, frozenset([1]))
    found = {word: pieces.data(known(library, word)) for word in ("<0xF0>", "▁the", "a", "▁", "<s>")}
    assert found == {"<0xF0>": b"\xf0", "▁the": b" the", "a": b"a", "▁": b" ", "<s>": None}
    assert pieces.name(1) == "<s>"
    ids = library.encode("a the b 🗼").ids
    assert b"".join(pieces.data(id) or b"" for id in ids) == " a the b 🗼".encode()


def test_pieces_of_words_join_on() -> None:
    pieces = Pieces(wordpiece(), frozenset())
    assert [pieces.data(id) for id in (1, 2, 3)] == [b" a", b" the", b"n"]


def test_added_tokens_are_their_text_and_unknown_ids_have_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces.data(2) is None
    assert tokenizer.pieces.name(2) == "<|im_end|>"
    assert tokenizer.pieces.data(99_999) is None
    assert tokenizer.pieces.name(99_999) == "<99999>"
    library = sentencepiece()
    library.add_tokens(["▁own <0x41>"])
    assert Pieces(library, frozenset()).data(known(library, "▁own <0x41>")) == "▁own <0x41>".encode()


def marks(tokenizer: Tokenizer) -> list[Mark]:
    first, *_ = tokenizer.text("🗼")
    return [
        Mark(int(tokenizer.text("a")[0]), b"a", -0.5, [Logprob(int(first), -0.25), Logprob(2, -math.inf)], 0),
        Mark(int(first), b"\xf0", -math.inf, [], 1),
        Mark(2, None, -1.0, [], 1),
    ]


def written(logprobs: Logprobs, marks: list[Mark]) -> Any:
    """As a client reads them."""
    return msgspec.json.decode(msgspec.json.encode(logprobs.fields(logprobs.entries(marks))))


def test_chat_logprobs_have_text_bytes_and_alternatives(tokenizer: Tokenizer) -> None:
    fields = written(ChatLogprobs(tokenizer.pieces), marks(tokenizer))
    a, part, special = fields["content"]
    assert fields["refusal"] is None
    assert (a["token"], a["logprob"], a["bytes"]) == ("a", -0.5, [97])
    assert a["top_logprobs"] == [
        {"token": "\\xf0", "logprob": -0.25, "bytes": [0xF0]},
        {"token": "<|im_end|>", "logprob": -9999.0, "bytes": None},
    ]
    assert part == {"token": "\\xf0", "logprob": -9999.0, "bytes": [0xF0], "top_logprobs": []}
    assert special == {"token": "<|im_end|>", "logprob": -1.0, "bytes": None, "top_logprobs": []}


def test_text_logprobs_are_lists_side_by_side(tokenizer: Tokenizer) -> None:
    fields = written(TextLogprobs(tokenizer.pieces), marks(tokenizer))
    assert fields["tokens"] == ["a", "bytes:\\xf0", "<|im_end|>"]
    assert fields["token_logprobs"] == [-0.5, -9999.0, -1.0]
    assert fields["top_logprobs"] == [
        {"bytes:\\xf0": -0.25, "<|im_end|>": -9999.0, "a": -0.5},
        {"bytes:\\xf0": -9999.0},
        {"<|im_end|>": -1.0},
    ]
    assert fields["text_offset"] == [0, 1, 1]


@pytest.mark.parametrize("kind", [ChatLogprobs, TextLogprobs])
def test_no_tokens_are_empty_lists(tokenizer: Tokenizer, kind: type[ChatLogprobs | TextLogprobs]) -> None:
    assert all(not value for value in kind(tokenizer.pieces).fields([]).values())


def test_the_end_of_a_long_answer_writes_no_log_probability_again(tokenizer: Tokenizer) -> None:
    """A second of it would let the mesh take the conductor for dead: what is written is kept, and only copied."""
    logprobs = ChatLogprobs(tokenizer.pieces)
    entries = logprobs.entries(marks(tokenizer))
    assert [entry for (entry,) in entries] == logprobs.fields(entries)["content"]
    assert all(isinstance(entry, msgspec.Raw) for (entry,) in entries)


@given(st.text(alphabet="aé日🗼", max_size=6), st.integers(0, 24))
def test_what_a_text_leaves_unfinished(text: str, cut: int) -> None:
    library = Library(models.BPE(byte_alphabet(), []))
    library.decoder = decoders.ByteLevel()
    data = text.encode()[:cut]
    assert Pieces(library, frozenset()).unfinished(list(data)) == len(data) - len(data.decode(errors="ignore").encode())
