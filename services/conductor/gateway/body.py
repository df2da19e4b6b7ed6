"""Request bodies as they travel: strictly typed, with errors that name field, value and limit. Pure.

Fields that OpenAI's clients send and this server does not act on are declared too: their neutral value is accepted,
any other is refused by name (see :mod:`services.conductor.gateway.unsupported`). A field that is not declared is
refused like OpenAI refuses it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from services.conductor.gateway.messages import CHOICES, ChatMessage
from shared.errors import InvalidInput

MAX_INT64 = 2**63 - 1
MAX_UINT32 = 2**32 - 1
MAX_STOPS = 16
MAX_STOP_IDS = 256
MAX_BIASES = 1024

Count = Annotated[int, Meta(ge=1, le=MAX_INT64)]
Natural = Annotated[int, Meta(ge=0, le=MAX_INT64)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_UINT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. ``None`` means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Natural | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Natural | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    n: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None


class ChatBody(Body, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionBody(Body, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    best_of: Count | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


B = TypeVar("B", bound=Body)
_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatBody, CompletionBody)
}


def decode_body(raw: bytes, kind: type[B]) -> B:
    """Raises InvalidInput; ``field`` is the path inside the body, as ``messages[0].content``."""
    try:
        body: B = _decoders[kind].decode(raw)
    except msgspec.ValidationError as e:
        raise _explained(str(e), raw) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise InvalidInput(f"the body is not valid JSON: {e}") from None
    return body


_WHERE = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*?)`)?\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")


def _explained(error: str, raw: bytes) -> InvalidInput:
    """The decoder's sentence with OpenAI's words, the field's path and the value that was sent."""
    match = _WHERE.match(error.replace(" | null`", "`"))
    what, path = (match["what"], match["path"] or "") if match else (error, "")
    if unknown := _UNKNOWN.match(what):
        field = clip(".".join(filter(None, (path, unknown["name"]))))
        return InvalidInput(f"Unrecognized request argument supplied: {field}", field=field)
    if missing := _MISSING.match(what):
        field = ".".join(filter(None, (path, missing["name"])))
        return InvalidInput(f"Missing required parameter: '{field}'", field=field)
    if not path:
        return InvalidInput(f"the body is not as expected: {what}")
    known = CHOICES.get(path.rpartition(".")[2], ()) if what.startswith("Invalid value") else ()
    limit = f" (supported are {', '.join(known)})" if known else ""
    return InvalidInput(
        f"Invalid value for '{path}': {what}{limit}; the request has {_value_at(path, raw)}", field=path
    )


def _value_at(path: str, raw: bytes) -> str:
    """The value at ``path`` as JSON, clipped; only asked for after the body failed its types."""
    try:
        value: Any = msgspec.json.decode(raw)
        for step in re.findall(r"[^.\[\]]+", path):
            value = value[int(step)] if isinstance(value, list) else value[step]
        return clip(msgspec.json.encode(value).decode())
    except (msgspec.MsgspecError, RecursionError, LookupError, ValueError, TypeError):
        return "another value"


def clip(text: str, limit: int = 64) -> str:
    """``text`` short enough to be said back to a client, on one line."""
    line = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return line if len(line) <= limit else line[:limit] + "..."
