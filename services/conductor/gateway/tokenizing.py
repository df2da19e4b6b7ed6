"""``/tokenize`` and ``/detokenize``: the model's tokenizer for those who count before they ask. Pure."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from services.conductor.gateway.body import TokenId, doc
from services.conductor.gateway.messages import ChatMessage, conversation
from services.conductor.gateway.tokenizer import Tokenizer
from shared.blocks import Tokens
from shared.errors import InvalidInput

Served = Annotated[str | None, doc("Name of the served model; may be left out.")]


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: Served = None
    prompt: Annotated[str | None, doc("Text, as `/v1/completions` takes it.")] = None
    messages: Annotated[
        Annotated[list[ChatMessage], Meta(min_length=1)] | None,
        doc("A conversation, as `/v1/chat/completions` takes it."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        doc("Put the model's special tokens around the text. Default: for a prompt; a template writes them."),
    ] = None
    add_generation_prompt: Annotated[
        bool | None, doc("End a conversation with the head of the assistant's answer. Default true.")
    ] = None
    return_token_strs: Annotated[bool | None, doc("Give the tokens' names in the vocabulary too. Default false.")] = (
        None
    )


class DetokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: Annotated[list[TokenId], doc("Token ids of the model's vocabulary.")]
    model: Served = None


class Tokenized(Struct, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=0, description="Number of tokens.")]
    max_model_len: Annotated[int | None, doc("Tokens of the model's context; null while no instance has told it.")]
    tokens: list[TokenId]
    token_strs: list[str] | None


class Detokenized(Struct, forbid_unknown_fields=True):
    prompt: Annotated[str, doc("The text, special tokens included.")]


def tokenize(body: TokenizeBody, tokenizer: Tokenizer, context: int | None) -> bytes:
    """Raises InvalidInput, also for a conversation that the model's template refuses."""
    ids = _ids(body, tokenizer).tolist()
    names = tokenizer.names(ids) if body.return_token_strs else None
    return msgspec.json.encode(Tokenized(len(ids), context, ids, names))


def detokenize(body: DetokenizeBody, tokenizer: Tokenizer) -> bytes:
    """Raises InvalidInput for an id that the model does not have."""
    for i, id in enumerate(body.tokens):
        if id >= tokenizer.vocabulary:
            message = f"'tokens[{i}]' is {id}; the model has {tokenizer.vocabulary} tokens"
            raise InvalidInput(message, field=f"tokens[{i}]")
    return msgspec.json.encode(Detokenized(tokenizer.decode(np.array(body.tokens, dtype=np.uint32))))


def _ids(body: TokenizeBody, tokenizer: Tokenizer) -> Tokens:
    special: Any = body.add_special_tokens
    if body.prompt is not None:
        if body.messages is not None:
            raise InvalidInput("'prompt' and 'messages' are both given; give one", field="messages")
        return tokenizer.text(body.prompt, special=special is not False)
    if body.messages is None:
        raise InvalidInput("Missing required parameter: 'prompt' or 'messages'", field="prompt")
    turns = conversation(body.messages)
    return tokenizer.chat(turns, special=bool(special), generation_prompt=body.add_generation_prompt is not False)
