"""The whole answer to one request: a transcript for each choice, usage and pace over all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.conductor.gateway.ask import Ask
from services.conductor.gateway.choices import leader
from services.conductor.gateway.content import Said
from services.conductor.gateway.generations import Step
from services.conductor.gateway.logprobs import Entry
from services.conductor.gateway.pace import Pace
from services.conductor.gateway.prompts import Prepared
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.gateway.trail import Trail
from services.conductor.gateway.transcript import Piece, Transcript


class Answer:
    """Choice ``i`` answers ``choices[i]``. ``arrived``: monotonic seconds when the request came.

    ``texts`` and ``logprobs`` are for an answer that is not streamed (:meth:`keep`). What a prompt took, its first
    choice says. ``said`` is for the trace, where that is to have the text.
    """

    def __init__(
        self, ask: Ask, choices: Sequence[Prepared], tokenizer: Tokenizer, arrived: float, said: Said | None = None
    ) -> None:
        self.ask = ask
        self.said = said
        self.openings = [choice.echo for choice in choices]
        self.transcripts = [
            Transcript(
                tokenizer.detokenizer(choice.tokens),
                ask.stops,
                choice.sampling,
                Trail(tokenizer.pieces) if ask.logprobs >= 0 else None,
            )
            for choice in choices
        ]
        self.texts: list[list[str]] = [[opening] for opening in self.openings]
        self.logprobs: list[list[Entry]] = [[] for _ in choices]
        self.paces = [Pace(arrived if leader(i, ask.n) == i else None) for i in range(len(choices))]
        self.prompt_tokens = sum(len(choice.tokens) for choice in choices[:: ask.n])
        self.cached_tokens = 0
        self._running = len(choices)

    def feed(self, step: Step, now: float) -> Piece | None:
        """The text that a token adds; None for one that comes after its choice has ended."""
        choice = step.choice
        transcript = self.transcripts[choice]
        if transcript.finish:
            return None
        usage = step.token.usage
        if usage is not None and leader(choice, self.ask.n) == choice:
            self.cached_tokens += usage.cached_tokens
        self.paces[choice].mark(now)
        piece = transcript.feed(step.token.output)
        if self.said is not None:
            self.said.hear(choice, piece.text)
        if piece.finish:
            self._running -= 1
        return piece

    def keep(self, choice: int, text: str, logprobs: Sequence[Entry]) -> None:
        """For the end, when all is sent together."""
        self.texts[choice].append(text)
        self.logprobs[choice] += logprobs

    @property
    def done(self) -> bool:
        return not self._running

    @property
    def completion_tokens(self) -> int:
        return sum(transcript.tokens for transcript in self.transcripts)

    def usage(self) -> dict[str, Any]:
        """As OpenAI counts: each prompt once, tokens of a stop string too; what was cached is part of the prompt."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
