"""The bytes that each token of a vocabulary stands for, whether or not they are whole characters."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from tokenizers import Tokenizer

LONGEST = 4  # bytes of a character
_Utf8 = codecs.getincrementaldecoder("utf-8")
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The letter by which a byte-level vocabulary writes each byte: itself where it is a printable Latin-1 character,
    else one of those from U+0100 on, in the order of the bytes."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


class Pieces:
    """Over the library's tokenizer. ``special``: ids of tokens that have no text. For any thread."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        decoder = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b""
        self._byte_level = b'"ByteLevel"' in decoder
        self._byte_fallback = b'"ByteFallback"' in decoder
        self._known: dict[int, bytes | None] = {}

    def data(self, token: int) -> bytes | None:
        """None for a special token, and for one that the vocabulary does not have: they have no text."""
        try:
            return self._known[token]
        except KeyError:
            found = self._known[token] = self._find(token)
            return found

    def unfinished(self, tokens: Sequence[int]) -> int:
        """How many tokens at the end of a text begin a character that they do not complete."""
        count, data = 0, b""
        while count < len(tokens) and len(data) < LONGEST:
            count += 1
            data = (self.data(tokens[-count]) or b"") + data
        decoder = _Utf8("ignore")
        decoder.decode(data)
        missing, count = len(decoder.getstate()[0]), 0
        while missing > 0:
            count += 1
            missing -= len(self.data(tokens[-count]) or b"")
        return count

    def name(self, token: int) -> str:
        """For a token without bytes."""
        return self._tokenizer.id_to_token(token) or f"<{token}>"

    def _find(self, token: int) -> bytes | None:
        piece = self._tokenizer.id_to_token(token)
        if token in self._special or piece is None:
            return None
        if token in self._added:
            return self._added[token].encode()
        if self._byte_level and all(letter in ALPHABET for letter in piece):
            return bytes(ALPHABET[letter] for letter in piece)
        if self._byte_fallback and (byte := BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return self._after_another(token).encode()

    def _after_another(self, token: int) -> str:
        """Its text in the middle of a text: a decoder may treat the first word in another way."""
        if self._anchor is None:
            return self._decode([token])
        return self._decode([self._anchor, token])[len(self._decode([self._anchor])) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    @cached_property
    def _anchor(self) -> int | None:
        return next(iter(self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]), None)

    @cached_property
    def _added(self) -> Mapping[int, str]:
        return {id: token.content for id, token in self._tokenizer.get_added_tokens_decoder().items()}


ALPHABET = byte_alphabet()
