"""The whole answer to one request: a transcript for each choice, usage and pace over all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.conductor.gateway.ask import Ask
from services.conductor.gateway.generations import Step
from services.conductor.gateway.pace import Pace
from services.conductor.gateway.prompts import Prepared
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.gateway.transcript import Piece, Transcript


class Answer:
    """Choice ``i`` answers ``prepared[i]``. ``arrived``: monotonic seconds when the request came."""

    def __init__(self, ask: Ask, prepared: Sequence[Prepared], tokenizer: Tokenizer, arrived: float) -> None:
        self.transcripts = [Transcript(tokenizer.detokenizer(p.tokens), ask.stops, p.sampling) for p in prepared]
        self.texts: list[list[str]] = [[] for _ in prepared]
        self.paces = [Pace(arrived) for _ in prepared]
        self.prompt_tokens = sum(len(p.tokens) for p in prepared)
        self.cached_tokens = 0

    def feed(self, step: Step, now: float) -> Piece | None:
        """The text that a token adds; None for one that comes after its choice has ended."""
        transcript = self.transcripts[step.choice]
        if transcript.finish:
            return None
        if step.token.usage is not None:
            self.cached_tokens += step.token.usage.cached_tokens
        self.paces[step.choice].mark(now)
        piece = transcript.feed(step.token.output)
        self.texts[step.choice].append(piece.text)
        return piece

    @property
    def done(self) -> bool:
        return all(transcript.finish for transcript in self.transcripts)

    @property
    def completion_tokens(self) -> int:
        return sum(transcript.tokens for transcript in self.transcripts)

    def usage(self) -> dict[str, Any]:
        """As OpenAI counts: tokens of a stop string count, what was cached is part of the prompt."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
