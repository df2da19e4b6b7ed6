"""Text from token ids as they come: never half a character, nothing lost at the end."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
CONTEXT = 8
PENDING = 64  # a character has at most four bytes: more tokens than this without one are no text


class Detokenizer:
    """Over the library's stream, which holds a token back while its bytes end inside a character.

    ``prompt``: the last ids of the prompt, so that the first word keeps or drops its space as the model meant.
    ``unfinished``: ids at its very end that begin a character, which is given out when it is complete. Special tokens
    (``special``) have no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: frozenset[int],
        prompt: Sequence[int] = (),
        unfinished: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._context = self._whole([i for i in prompt[-CONTEXT:] if i not in special])
        self._pending: list[int] = []
        self._stream = self._new_stream()
        self._foreign = ""  # of the prompt's text, what comes with the character that it left unfinished
        if unfinished:
            self._begin(unfinished)

    def feed(self, token: int) -> str:
        """The text that is complete now, "" while it is not."""
        if token in self._special:
            return ""
        self._pending.append(token)
        try:
            text: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # the library gives up on a prefix that decodes differently later; its error has no class
            return self._restart()
        if text:
            self._settle()
            return self._own(text) if self._foreign else text
        return self._restart() if len(self._pending) >= PENDING else ""

    def flush(self) -> str:
        """The rest, when no more tokens come; bytes of a character that was cut off are dropped."""
        text = self._tail().rstrip(REPLACEMENT)
        self._settle()
        return self._own(text) if self._foreign else text

    def _begin(self, unfinished: Sequence[int]) -> None:
        self._pending = list(unfinished)
        self._foreign = self._tail()
        for token in unfinished:
            self._stream.step(self._tokenizer, token)

    def _own(self, text: str) -> str:
        """``text`` without the prompt's. What never became a character (``text`` begins with the replacement, too) was
        the prompt's own."""
        before, self._foreign = self._foreign.rstrip(REPLACEMENT), ""
        return text.removeprefix(before).lstrip(REPLACEMENT)

    def _whole(self, context: list[int]) -> list[int]:
        """``context``, unless it ends inside a character: the stream would then give the prompt's text out again."""
        return [] if self._tokenizer.decode(context, skip_special_tokens=False).endswith(REPLACEMENT) else context

    def _tail(self) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        after = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        return after[len(before) :]

    def _restart(self) -> str:
        text = self._tail()
        self._settle()
        self._stream = self._new_stream()
        return self._own(text) if self._foreign else text

    def _settle(self) -> None:
        if self._pending:
            self._context = (self._context + self._pending)[-max(CONTEXT, len(self._pending)) :]
            self._pending = []

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=list(self._context), skip_special_tokens=False)
