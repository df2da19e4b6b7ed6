"""From what was asked to what is dispatched: token ids, context check, block keys. Pure, and made for a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from services.conductor.gateway.ask import Ask, Prompt, too_long
from services.conductor.gateway.tokenizer import Tokenizer
from shared.blocks import Namespace, Tokens, chain_keys
from shared.errors import ContextLengthExceeded, InvalidInput
from shared.messages import Sampling


@dataclass(frozen=True)
class Limits:
    """``context``: tokens that prompt and answer may have together. ``default_max``: ``max_tokens`` when not given."""

    context: int
    default_max: int


@dataclass(frozen=True)
class Prepared:
    """One prompt, ready to be scheduled. ``keys``: chain of its full blocks under ``root``. ``echo``: its text,
    where an answer is to begin with it."""

    tokens: Tokens
    root: bytes
    keys: bytes
    sampling: Sampling
    echo: str = ""


Hashing = Callable[[bytes, Tokens, int], bytes]
"""Root, tokens and block size -> chain of keys."""


def prepare(
    ask: Ask, tokenizer: Tokenizer, namespace: Namespace, limits: Limits, hashing: Hashing = chain_keys
) -> list[Prepared]:
    """``namespace``: with the tenant's salt. All prompts are checked before any is hashed.

    Raises InvalidInput (a template that refuses, a token id that the model does not have), ContextLengthExceeded.
    """
    ask.check_ids(tokenizer.vocabulary)
    prompts = [_tokens(prompt, tokenizer, ask, limits.context) for prompt in ask.prompts]
    samplings = [ask.sampling(len(t), limits.context, limits.default_max, tokenizer.eos) for t in prompts]
    root = namespace.root()
    return [
        Prepared(tokens, root, hashing(root, tokens, namespace.block_size), sampling, _echo(ask, prompt, tokenizer))
        for prompt, tokens, sampling in zip(ask.prompts, prompts, samplings, strict=True)
    ]


def salted(namespace: Namespace, salt: str) -> Namespace:
    return msgspec.structs.replace(namespace, salt=salt)


def _echo(ask: Ask, prompt: Prompt, tokenizer: Tokenizer) -> str:
    if not ask.echo or isinstance(prompt, list):
        return ""
    return prompt if isinstance(prompt, str) else tokenizer.echo(prompt)


def _tokens(prompt: Prompt, tokenizer: Tokenizer, ask: Ask, context: int) -> Tokens:
    if isinstance(prompt, np.ndarray):
        highest = int(prompt.max())
        if highest >= tokenizer.vocabulary:
            message = f"'{ask.field}' has the token id {highest}; the model has {tokenizer.vocabulary} tokens"
            raise InvalidInput(message, field=ask.field)
        return prompt
    text = prompt if isinstance(prompt, str) else tokenizer.render(prompt)
    if tokenizer.fewest(text) > context:
        raise ContextLengthExceeded(
            too_long(context, tokenizer.fewest(text), 0, ask.field, least=True), field=ask.field
        )
    tokens = tokenizer.text(text, special=isinstance(prompt, str))  # a template writes the special tokens itself
    if not len(tokens):
        raise InvalidInput(f"'{ask.field}' has no tokens", field=ask.field)
    return tokens
