"""The messages that start an attempt, from a request and what was delivered of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.conductor.dispatch.attempts import Attempt
from services.conductor.dispatch.placing import Placement
from services.conductor.generation import Generation
from shared.blocks import KEY, Tokens, chain_keys, key_count, pack_tokens
from shared.messages import Admission, Admit, Cancel, Ref, Since, Source, Submit


@dataclass(frozen=True)
class Work:
    """What an attempt computes. ``tokens``: the prompt and the outputs it resumes with; ``keys``: their full blocks."""

    generation: Generation
    tokens: Tokens
    keys: bytes

    @property
    def drawn(self) -> int:
        return len(self.tokens) - len(self.generation.tokens)


def work(generation: Generation, outputs: Tokens, block_size: int) -> Work:
    """Prompt and delivered outputs as one sequence; its chain continues that of the prompt."""
    if not len(outputs):
        return Work(generation, generation.tokens, generation.keys)
    tokens = np.concatenate([generation.tokens, outputs])
    parent = generation.keys[-KEY:] or generation.root
    rest = tokens[key_count(generation.keys) * block_size :]
    return Work(generation, tokens, generation.keys + chain_keys(parent, rest, block_size))


class Letters:
    """Writes the messages of one attempt. ``lists``: number of the last live list sent."""

    def __init__(self, me: Ref, work: Work, placement: Placement, attempt: Attempt, lists: int) -> None:
        self._me = me
        self._work = work
        self._placement = placement
        self._attempt = attempt
        self._lists = lists
        self._packed = pack_tokens(work.tokens)

    def submit(self, age: float, deadline: float) -> Submit:
        return Submit(
            sender=self._me,
            target=self._placement.prefill,
            request=self._work.generation.id,
            attempt=self._attempt.number,
            admission=self._admission(age, deadline),
            decode=self._placement.decode,
            fetch_blocks=self._placement.decision.fetch_blocks,
            prefix_blocks=self._placement.decision.prefix_blocks,
        )

    def admit(self, age: float, deadline: float) -> Admit:
        return Admit(
            sender=self._me,
            target=self._placement.decode,
            request=self._work.generation.id,
            attempt=self._attempt.number,
            admission=self._admission(age, deadline),
            prefill=self._placement.prefill,
        )

    def since(self, ref: Ref, index: int, most: int) -> Since:
        return Since(
            sender=self._me,
            target=ref,
            request=self._work.generation.id,
            attempt=self._attempt.number,
            index=index,
            most=most,
        )

    def cancel(self, ref: Ref, reason: str) -> Cancel:
        return Cancel(
            sender=self._me, target=ref, request=self._work.generation.id, attempt=self._attempt.number, reason=reason
        )

    def _admission(self, age: float, deadline: float) -> Admission:
        """``age``, ``deadline``: seconds since the request arrived, and until its objective."""
        generation = self._work.generation
        return Admission(
            gateway=self._me,
            tokens=self._packed,
            prompt_tokens=len(generation.tokens),
            root=generation.root,
            keys=self._work.keys,
            sampling=generation.sampling,
            lists=self._lists,
            age_ms=int(age * 1000),
            deadline_ms=int(deadline * 1000),
            priority=generation.priority,
            expected_output=self._placement.ask.expected_output,
            sources=[Source(agent, blocks) for agent, blocks in self._placement.decision.sources],
            tenant=generation.tenant,
        )
