"""One running sequence: its tokens, its slots, and which of its blocks are committed. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from shared.blocks import chain_keys
from shared.engines.base import Draw, Held, Work
from shared.instance.attempts import Key
from shared.instance.job import Prompt
from shared.messages import Output, Ref


@dataclass(frozen=True)
class Filled:
    """Consecutive full blocks to commit, from block ``first``."""

    first: int
    holds: Seq[Held]
    parent: bytes
    keys: Seq[bytes]


class Sequence:
    """Tokens [0, ``length``) are known; KV of the first ``done`` is in the pool. ``held[i]`` is block i's slot;
    blocks in ``shared`` are committed already and never written."""

    def __init__(
        self, key: Key, gateway: Ref, prompt: Prompt, born: float, held: list[Held], shared: frozenset[int]
    ) -> None:
        self.key, self.gateway, self.prompt, self.born = key, gateway, prompt, born
        self.size = prompt.block_size
        self.held, self.shared = held, shared
        self.keys = list(prompt.keys)
        self.done = self.length = len(prompt)
        self.committed = 0
        self.flushing = False
        self._tokens = np.zeros(max(2 * self.length, 64), dtype=np.uint32)
        self._tokens[: self.length] = prompt.tokens

    @property
    def index(self) -> int:
        """Index of the next output."""
        return self.length - self.prompt.prompt_tokens

    @property
    def slots(self) -> list[int]:
        return [one.slot for one in self.held]

    @property
    def wants_slot(self) -> bool:
        """True when the next position has no slot yet."""
        return self.done // self.size >= len(self.held)

    def push(self, token: int) -> None:
        """A token was drawn (or came with the start)."""
        if self.length == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[self.length] = token
        self.length += 1

    def work(self) -> Work:
        """The next step: the last token's KV and, unless flushing, a draw after it."""
        at = self.prompt.prompt_tokens
        known = self._tokens[: self.length]
        draw = None if self.flushing else Draw(self.prompt.sampling, self.index, 0, known[:at], known[at:])
        return Work(known[self.done :], self.done, self.slots, draw)

    def stepped(self) -> None:
        """The step's KV is in the pool."""
        self.done = self.length

    def accept(self, token: int, context: int, logprob: float = 0.0, top: Seq[object] = ()) -> Output:
        """The step drew ``token``."""
        index = self.index
        self.push(token)
        return Output(index, token, self.prompt.finish(token, index, context), 0, logprob, list(top))  # type: ignore[arg-type]

    @property
    def fills_with_last(self) -> bool:
        """True when the KV of the last token, which nobody here attends to, fills a block for the next turn."""
        return self.length % self.size == 0

    def filled(self) -> list[Filled]:
        """Full blocks not handed out before, in runs. The caller commits them in this order."""
        first, self.committed = self.committed, self.done // self.size
        self._extend_keys(self.committed)
        runs: list[tuple[int, int]] = []
        for block in range(first, self.committed):
            if block in self.shared:
                continue
            if runs and runs[-1][1] == block:
                runs[-1] = (runs[-1][0], block + 1)
            else:
                runs.append((block, block + 1))
        return [Filled(a, self.held[a:b], self._parent(a), self.keys[a:b]) for a, b in runs]

    def _parent(self, block: int) -> bytes:
        return self.keys[block - 1] if block else self.prompt.root

    def _extend_keys(self, blocks: int) -> None:
        for block in range(len(self.keys), blocks):
            tokens = self._tokens[block * self.size : (block + 1) * self.size]
            self.keys.append(chain_keys(self._parent(block), tokens, self.size))
