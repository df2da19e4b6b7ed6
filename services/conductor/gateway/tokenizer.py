"""The model's tokenizer, read from its folder with the ``tokenizers`` library alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library

from services.conductor.gateway.chat_template import ChatTemplate
from services.conductor.gateway.density import Density
from services.conductor.gateway.detokenizer import REPLACEMENT, Detokenizer
from services.conductor.gateway.pieces import Pieces
from shared.blocks import Tokens
from shared.errors import ConfigError, InvalidInput
from shared.model_info import read_json


class Tokenizer:
    """Text to token ids and back. Immutable once loaded; every method may be called from any thread."""

    def __init__(self, library: Library, template: ChatTemplate | None, eos: frozenset[int]) -> None:
        self._library = library
        self._template = template
        added: dict[int, Any] = library.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.eos = eos
        self.pieces = Pieces(library, self.special)
        self._density = Density(library)
        self.vocabulary = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read ``tokenizer.json`` and what lies beside it. Raises ConfigError, naming the file."""
        path = folder / "tokenizer.json"
        try:
            library = Library.from_file(str(path))
        except Exception as e:  # the library raises plain Exception for a missing and for a broken file
            raise ConfigError(f"no usable tokenizer in {path}: {e}", field="model") from e
        library.no_truncation()
        library.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        names = special_tokens(read_json(folder / "special_tokens_map.json")) | special_tokens(config)
        source = template_source(folder, config)
        template = ChatTemplate(source, names) if source else None
        return Tokenizer(library, template, eos_ids(folder, library, names))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, special: bool = False, generation_prompt: bool = True
    ) -> Tokens:
        """The prompt of a conversation. The template writes the special tokens itself; ``special`` adds them again."""
        return self.text(self.render(messages, generation_prompt=generation_prompt), special=special)

    def render(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True) -> str:
        """The text of a conversation's prompt. Raises InvalidInput."""
        if self._template is None:
            raise InvalidInput("this model has no chat template; use /v1/completions", field="messages")
        return self._template.render(messages, generation_prompt=generation_prompt)

    def fewest(self, text: str) -> int:
        """So many tokens at least, without a look at the words; 0 where nothing can be said."""
        return self._density.fewest(text)

    def text(self, prompt: str, *, special: bool = True) -> Tokens:
        """A bare prompt, with the tokens that the model wants around one.

        The library's plain ``encode`` holds the interpreter's lock to its end, so that the event loop stands still
        whatever thread it runs in; this one lets go of it, and computes no offsets.
        """
        (encoding,) = self._library.encode_batch_fast([prompt], add_special_tokens=special)
        return np.array(encoding.ids, dtype=np.uint32)

    def names(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them; "" for an id that it leaves out."""
        return [self._library.id_to_token(id) or "" for id in ids]

    def decode(self, tokens: Tokens) -> str:
        """The text of a prompt that came as token ids, its special tokens included."""
        (text,) = self._library.decode_batch(
            [tokens.tolist()], skip_special_tokens=False
        )  # as a batch it lets others run
        return str(text)

    def echo(self, prompt: Tokens) -> str:
        """The same without a character that the prompt leaves unfinished: its end is the answer's."""
        text = self.decode(prompt)
        return text.rstrip(REPLACEMENT) if self.pieces.unfinished(prompt[-64:].tolist()) else text

    def detokenizer(self, prompt: Tokens) -> Detokenizer:
        """Of what follows ``prompt``."""
        last = [id for id in prompt[-64:].tolist() if id not in self.special]
        whole = len(last) - self.pieces.unfinished(last)
        return Detokenizer(self._library, self.special, last[:whole], last[whole:])


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token`` ... of a tokenizer_config.json, whose values are strings or described tokens."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def template_source(folder: Path, config: Mapping[str, Any]) -> str:
    """Chat template of a model folder: a file of its own, or in the configuration (one, or a list of named ones)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    value = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def eos_ids(folder: Path, library: Library, names: Mapping[str, str]) -> frozenset[int]:
    """Every id that ends an answer: the generation config's (else the model config's), and the tokenizer's own."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        value = read_json(folder / file).get("eos_token_id")
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
            break
    own = library.token_to_id(names["eos_token"]) if "eos_token" in names else None
    return frozenset(found if own is None else found | {own})
