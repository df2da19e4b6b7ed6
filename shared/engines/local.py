"""A whole request in one process, over the same engine: what the mesh's output and speed are compared to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.blocks import Tokens
from shared.engines.base import Draw, Drawn, Engine, Work
from shared.engines.private_pool import anonymous_pool
from shared.engines.sampling import finish_reason
from shared.errors import ContextLengthExceeded, DoesNotFit
from shared.messages import Output, Sampling


@dataclass
class _Sequence:
    request: int
    choice: int
    prompt: Tokens
    sampling: Sampling
    slots: list[int] = field(default_factory=list)
    done: int = 0
    outputs: list[Output] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.outputs) and bool(self.outputs[-1].finish)

    def pending(self, budget: int) -> Tokens:
        """Tokens without KV, at most ``budget``: of the prompt, or the output drawn last."""
        if self.done < len(self.prompt):
            return self.prompt[self.done : self.done + budget]
        return np.array([self.outputs[-1].token], dtype=np.uint32)

    def work(self, budget: int) -> Work:
        tokens = self.pending(budget)
        drawing = self.done + len(tokens) >= len(self.prompt)
        return Work(tokens, self.done, self.slots, self._draw() if drawing else None)

    def _draw(self) -> Draw:
        outputs = np.array([output.token for output in self.outputs], dtype=np.uint32)
        return Draw(self.sampling, len(self.outputs), self.choice, self.prompt, outputs)

    def accept(self, drawn: Drawn) -> None:
        index = len(self.outputs)
        finish = finish_reason(self.sampling, drawn.token, index)
        self.outputs.append(Output(index, drawn.token, finish, self.choice, drawn.logprob, list(drawn.top)))


class LocalRunner:
    """Continuous batching with chunked prefill over a private pool of ``slots`` blocks, which the engine stays bound
    to until ``close``. Not thread-safe. No prefix is kept from one call to the next."""

    def __init__(self, engine: Engine, *, slots: int = 512, chunk: int = 512, max_batch: int = 16) -> None:
        self.engine = engine
        self.chunk = chunk
        self.max_batch = max_batch
        self._slots = slots
        self._free = list(range(slots))
        with anonymous_pool(engine.namespace.geometry, slots) as pool:
            engine.bind(pool)

    def close(self) -> None:
        self.engine.unbind()

    def __enter__(self) -> LocalRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, tokens: Any, sampling: Sampling) -> list[Output]:
        """Outputs of all choices, ordered by choice and index, with finish reasons as the mesh gives them."""
        return self.generate_many([(tokens, sampling)])[0]

    def generate_many(self, requests: Sequence[tuple[Any, Sampling]]) -> list[list[Output]]:
        """Results in input order. Raises ContextLengthExceeded and DoesNotFit before anything is computed."""
        waiting = deque(
            s for number, (tokens, sampling) in enumerate(requests) for s in _open(number, tokens, sampling)
        )
        for sequence in waiting:
            self._check(sequence)
        every, running = list(waiting), list[_Sequence]()
        while waiting or running:
            self._join(waiting, running)
            self._step(running)
            for sequence in [s for s in running if s.finished]:
                running.remove(sequence)
                self._free += sequence.slots
        results: list[list[Output]] = [[] for _ in requests]
        for sequence in every:
            results[sequence.request] += sequence.outputs
        return results

    def _blocks(self, sequence: _Sequence) -> int:
        """For the whole life of the sequence; the last output never gets KV."""
        return self.engine.namespace.geometry.blocks(len(sequence.prompt) + sequence.sampling.max_tokens - 1)

    def _check(self, sequence: _Sequence) -> None:
        total = len(sequence.prompt) + sequence.sampling.max_tokens
        if total > self.engine.context_length:
            raise ContextLengthExceeded(f"{total} tokens, the context has {self.engine.context_length}", field="prompt")
        if self._blocks(sequence) > self._slots:
            raise DoesNotFit(f"{self._blocks(sequence)} blocks, the pool has {self._slots}")

    def _join(self, waiting: deque[_Sequence], running: list[_Sequence]) -> None:
        while waiting and len(running) < self.max_batch and self._blocks(waiting[0]) <= len(self._free):
            sequence = waiting.popleft()
            need = self._blocks(sequence)
            sequence.slots, self._free = self._free[:need], self._free[need:]
            running.append(sequence)

    def _step(self, running: list[_Sequence]) -> None:
        budget, batch, items = self.chunk, list[_Sequence](), list[Work]()
        for sequence in running:
            prefilling = sequence.done < len(sequence.prompt)
            if prefilling and not budget:
                continue
            work = sequence.work(budget)
            budget -= len(work.tokens) if prefilling else 0
            batch.append(sequence)
            items.append(work)
        for sequence, work, drawn in zip(batch, items, self.engine.step(items), strict=True):
            sequence.done += len(work.tokens)
            if drawn is not None:
                sequence.accept(drawn)


def _open(number: int, tokens: Any, sampling: Sampling) -> list[_Sequence]:
    prompt = np.asarray(tokens, dtype=np.uint32)
    return [_Sequence(number, choice, prompt, sampling) for choice in range(sampling.choices)]
