"""How few tokens a text can be: a prompt far too long for the context is refused before it is tokenized."""

from __future__ import annotations

import json

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from services.conductor.gateway.pieces import byte_alphabet


class Density:
    """Known for byte-level vocabularies only. Elsewhere text may be changed or left out on its way to tokens: by a
    normalizer, a split that removes, an added token that takes spaces along."""

    def __init__(self, library: Library) -> None:
        self._longest, self._lost = _longest(library), b""
        if self._longest:
            vocabulary = library.get_vocab(with_added_tokens=False)
            self._lost = bytes(byte for char, byte in byte_alphabet().items() if char not in vocabulary)

    def fewest(self, text: str) -> int:
        """So many tokens at least, without a look at the words; 0 where nothing can be said."""
        if not self._longest:
            return 0
        return -(-len(text.encode().translate(None, self._lost)) // self._longest)


def _longest(library: Library) -> int:
    """The most bytes of text that one token stands for; 0 where that is not known."""
    if library.normalizer is not None or not isinstance(library.model, models.BPE):
        return 0
    if not isinstance(library.decoder, decoders.ByteLevel):
        return 0
    if '"Removed"' in json.dumps(json.loads(library.to_str())["pre_tokenizer"]):
        return 0
    added = library.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return 0
    words = library.get_vocab(with_added_tokens=False)  # a character of such a word is a byte
    return max([0, *map(len, words), *(len(token.content.encode()) for token in added)])
