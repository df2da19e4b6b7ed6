"""What a client asks for, checked and in one form for both endpoints. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.conductor.gateway.body import MAX_CHOICES, MAX_LISTED, MAX_UINT32, Body, ChatBody, CompletionBody, clip
from services.conductor.gateway.messages import Conversation, conversation
from services.conductor.gateway.unsupported import refuse_unsupported
from services.conductor.generation import BYTES_PER_TOKEN
from shared.blocks import Tokens
from shared.errors import ContextLengthExceeded, InvalidInput
from shared.messages import Sampling

Prompt = str | Tokens | Conversation


@dataclass(frozen=True)
class Ask:
    """A request whose every value is in range. ``field``: where the prompts came from, for messages to the client.

    ``n``: answers to each of ``prompts``. ``stops`` are stop strings, ``stop_ids`` those of the request (without EOS).
    ``max_tokens`` None: as many as fit. ``logprobs``: alternatives to each token, -1 for no log-probabilities at all.
    ``echo``: an answer's text begins with its prompt's. ``priority``: higher is more urgent.
    """

    model: str
    field: str
    prompts: list[Prompt]
    n: int
    stream: bool
    include_usage: bool
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int
    echo: bool
    priority: int

    @property
    def chat(self) -> bool:
        return self.field == "messages"

    @property
    def ready(self) -> bool:
        """Its prompts are token ids already, and not to be turned into text."""
        return not self.echo and all(isinstance(prompt, np.ndarray) for prompt in self.prompts)

    @property
    def least_tokens(self) -> int:
        """So many tokens the first prompt has at least, which decides for all; told without tokenizing. A run of blanks
        or of one sign is few tokens, however long it is; but none reaches over a word's beginning."""
        first = self.prompts[0]
        if isinstance(first, np.ndarray):
            return len(first)
        texts = (
            [first] if isinstance(first, str) else [turn["content"] for turn in first if turn["role"] != "assistant"]
        )
        return sum(min(len(text) // BYTES_PER_TOKEN, len(text.split())) for text in texts)

    def check_ids(self, vocabulary: int) -> None:
        """Raises InvalidInput for a token id that a model with so many tokens does not have."""
        for field, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_ids)):
            highest = max(ids, default=-1)
            if highest >= vocabulary:
                message = f"'{field}' has the token id {highest}; the model has {vocabulary} tokens"
                raise InvalidInput(message, field=field)

    def sampling(self, prompt_tokens: int, context: int, default_max: int, eos: frozenset[int]) -> Sampling:
        """For a prompt of so many tokens. Raises ContextLengthExceeded, naming both lengths and the limit."""
        room = context - prompt_tokens
        wanted = self.max_tokens if self.max_tokens is not None else max(1, min(room, default_max), self.min_tokens)
        if wanted > room:
            message = too_long(context, prompt_tokens, self.max_tokens or self.min_tokens, self.field)
            raise ContextLengthExceeded(message, field=self.field)
        self._check_listed(wanted)
        ends = set(self.stop_ids) if self.ignore_eos else set(self.stop_ids) | eos
        return Sampling(
            max_tokens=wanted,
            seed=self.seed,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_ids=sorted(ends),
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
        )

    def _check_listed(self, max_tokens: int) -> None:
        """An answer that is not streamed is kept until it is complete, log-probabilities and all."""
        entries = self.n * len(self.prompts) * max_tokens * (self.logprobs + 1)
        if entries > MAX_LISTED and not self.stream:
            what = "choices × 'max_tokens' × log-probabilities a token"
            message = f"{what} is {entries}; without 'stream' at most {MAX_LISTED} are given in one answer"
            raise InvalidInput(message, field="max_tokens")


def ask_chat(body: ChatBody) -> Ask:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidInput("'max_tokens' and 'max_completion_tokens' differ; give one", field="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("'top_logprobs' is only allowed when 'logprobs' is true", field="top_logprobs")
    refuse_unsupported(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return _ask(body, "messages", [conversation(body.messages)], limit, logprobs)


def ask_completion(body: CompletionBody) -> Ask:
    refuse_unsupported(body)
    n = body.n or 1
    if body.best_of not in (None, n):
        raise InvalidInput(f"'best_of' is {body.best_of}; only the value of 'n', {n}, is supported", field="best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidInput("'echo' is not supported together with 'logprobs': a prompt's are not known", field="echo")
    logprobs = -1 if body.logprobs is None else body.logprobs
    return _ask(body, "prompt", _prompts(body.prompt, n), body.max_tokens, logprobs, bool(body.echo))


def _ask(
    body: Body, field: str, prompts: list[Prompt], max_tokens: int | None, logprobs: int, echo: bool = False
) -> Ask:
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("'stream_options' is only allowed when 'stream' is true", field="stream_options")
    low = body.min_tokens or 0
    if max_tokens is not None and low > max_tokens:
        raise InvalidInput(f"'min_tokens' {low} is more than 'max_tokens' {max_tokens}", field="min_tokens")
    stop = body.stop or ()
    return Ask(
        model=body.model,
        field=field,
        prompts=prompts,
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        max_tokens=max_tokens,
        min_tokens=low,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=min(body.top_k or 0, 2**31 - 1),
        seed=random.getrandbits(62) if body.seed is None else body.seed,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        echo=echo,
        priority=-(body.priority or 0),
    )


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """Token ids are JSON keys, so they come as text."""
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= MAX_UINT32):
            raise InvalidInput(f"'logit_bias' has the key {clip(key)!r}, which is no token id", field="logit_bias")
        found[int(key)] = value
    return found


def _prompts(prompt: str | list[Any], n: int) -> list[Prompt]:
    """One prompt, or a list of them: text, token ids, or lists of one of either. ``n``: answers to each."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [_prompt(prompt, "prompt")]
    if not prompt:
        raise InvalidInput("'prompt' must not be empty", field="prompt")
    if len(prompt) * n > MAX_CHOICES:
        message = f"'prompt' has {len(prompt)} prompts and 'n' is {n}; at most {MAX_CHOICES} answers are given together"
        raise InvalidInput(message, field="n" if len(prompt) <= MAX_CHOICES else "prompt")
    kind = type(prompt[0])
    for i, one in enumerate(prompt):
        if type(one) is not kind:
            raise InvalidInput(f"'prompt[{i}]' is of another kind than 'prompt[0]'", field=f"prompt[{i}]")
    return [_prompt(one, f"prompt[{i}]") for i, one in enumerate(prompt)]


def _prompt(prompt: str | list[Any], where: str) -> Prompt:
    if not prompt:
        raise InvalidInput(f"'{where}' must not be empty", field=where)
    if isinstance(prompt, str):
        return prompt
    if set(map(type, prompt)) != {int}:
        i = next(i for i, one in enumerate(prompt) if type(one) is not int)
        raise InvalidInput(f"'{where}[{i}]' is no token id", field=f"{where}[{i}]")
    return np.fromiter(prompt, np.uint32, len(prompt))


def too_long(context: int, prompt: int, completion: int, field: str, *, least: bool = False) -> str:
    """``least``: the prompt has so many tokens or more; it was not counted."""
    if not completion:
        has = f"{'at least ' if least else ''}{prompt} tokens"
        return f"This model's maximum context length is {context} tokens, but your {field} has {has}."
    return (
        f"This model's maximum context length is {context} tokens. However, you requested {prompt + completion} tokens "
        f"({prompt} in the {field}, {completion} in the completion). Please reduce the length of either."
    )
