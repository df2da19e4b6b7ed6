"""Request bodies as they travel: strictly typed, with errors that name field, value and limit. Pure.

Fields that OpenAI's clients send and this server does not act on are declared too: their neutral value is accepted,
any other is refused by name (see :mod:`services.conductor.gateway.unsupported`). A field that is not declared is
refused like OpenAI refuses it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from services.conductor.gateway.messages import CHOICES, ChatMessage
from shared.errors import InvalidInput

MAX_INT64 = 2**63 - 1
MAX_UINT32 = 2**32 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_LISTED = 2**20
MAX_PRIORITY = 100


def doc(text: str) -> Meta:
    """What the description of the API says of a field."""
    return Meta(description=text)


Count = Annotated[int, Meta(ge=1, le=MAX_INT64)]
Natural = Annotated[int, Meta(ge=0, le=MAX_INT64)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_UINT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
Ineffective = Annotated[str | None, doc("Accepted, without effect.")]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: Annotated[
        bool | None, doc("One more chunk before `[DONE]`, with `choices: []` and the usage of the whole answer.")
    ] = None
    include_obfuscation: Annotated[bool | None, doc("Accepted, without effect: no padding is sent.")] = None


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. ``None`` means: not given."""

    model: Annotated[str, Meta(min_length=1, description="Name of the served model, as `/v1/models` lists it.")]
    stream: Annotated[bool | None, doc("Answer with server-sent events, the last of which is `[DONE]`.")] = None
    stream_options: Annotated[StreamOptions | None, doc("Only together with `stream: true`.")] = None
    max_tokens: Annotated[
        Count | None, doc("Most tokens of an answer. Default: the rest of the context, up to `default_max_tokens`.")
    ] = None
    min_tokens: Annotated[
        Natural | None,
        doc("Tokens before which nothing ends the answer: no EOS, stop token or stop string. Default 0."),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, doc("0 takes the most likely token each time. Default 1.")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        doc("Draw among the fewest tokens whose probabilities reach this sum. Default 1: all."),
    ] = None
    top_k: Annotated[Natural | None, doc("Draw among so many most likely tokens. Default 0: all.")] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        doc("Least probability of a token that may be drawn, relative to that of the most likely one. Default 0."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None,
        doc(
            "The same request with the same seed is answered alike. Choice 0 of `n` is that of `n: 1`. Default: random."
        ),
    ] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        doc("Answers to each prompt, whose full KV blocks are computed once for all of them. Default 1."),
    ] = None
    stop: Annotated[
        StopText | Stops | None,
        doc("The text ends before whichever of these strings is complete first; of two that end together, the longer."),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None,
        doc("Tokens that end the answer, as EOS does; such a token has no text."),
    ] = None
    ignore_eos: Annotated[bool | None, doc("Go on behind the model's own end. Default false.")] = None
    presence_penalty: Annotated[
        Penalty | None, doc("Taken from the logit of every token that the answer has already. Default 0.")
    ] = None
    frequency_penalty: Annotated[
        Penalty | None, doc("Taken from a token's logit once for each time that the answer has it. Default 0.")
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=10)] | None,
        doc("Divides positive and multiplies negative logits of tokens that prompt or answer have. Default 1: off."),
    ] = None
    logit_bias: Annotated[
        Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None,
        doc("Added to the logits of tokens, by id. -100 forbids a token, 100 as good as forces it."),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None,
        doc("Lower goes earlier: a step counts like a second of the objective for the first token. Default 0."),
    ] = None
    user: Ineffective = None
    metadata: Annotated[dict[str, str] | None, doc("Accepted, without effect.")] = None
    store: Annotated[bool | None, doc("Accepted, without effect: no answer is kept.")] = None


class ChatBody(Body, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, description="The conversation, oldest message first.")]
    max_completion_tokens: Annotated[Count | None, doc("The newer name of `max_tokens`.")] = None
    logprobs: Annotated[
        bool | None,
        doc(
            "Log-probabilities of the answer's tokens, as the model gives them before any setting above. A token that "
            "ends the answer, and one of which a stop string cut off a part, is not listed."
        ),
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        doc("So many most likely tokens at each position; wants `logprobs: true`. Default 0."),
    ] = None
    service_tier: Ineffective = None
    prompt_cache_key: Ineffective = None
    prompt_cache_retention: Ineffective = None
    prompt_cache_options: Annotated[dict[str, Any] | None, doc("Accepted, without effect.")] = None
    safety_identifier: Ineffective = None
    parallel_tool_calls: Annotated[bool | None, doc("Accepted, without effect.")] = None
    response_format: Annotated[Any, doc('Only `{"type": "text"}` is supported.')] = None
    tools: Annotated[Any, doc('Not supported: taken when it is empty or `tool_choice` is `"none"`, and not used.')] = (
        None
    )
    tool_choice: Annotated[Any, doc('Only `"none"`, and `"auto"` without tools: no tool is ever called.')] = None
    functions: Annotated[Any, doc('Not supported: taken when it is empty or `function_call` is `"none"`.')] = None
    function_call: Annotated[Any, doc('Only `"none"`, and `"auto"` without functions.')] = None
    modalities: Annotated[Any, doc('Only `["text"]` is supported.')] = None
    audio: Annotated[Any, doc("Not supported.")] = None
    prediction: Annotated[Any, doc("Not supported.")] = None
    reasoning_effort: Annotated[Any, doc('Only `"none"` is supported.')] = None
    verbosity: Annotated[Any, doc('Only `"medium"` is supported.')] = None
    web_search_options: Annotated[Any, doc("Not supported.")] = None
    moderation: Annotated[Any, doc("Not supported.")] = None


class CompletionBody(Body, kw_only=True):
    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        doc("Text, token ids, or up to 128 of either. Answer `j` to prompt `i` has the index `i * n + j`."),
    ]
    echo: Annotated[bool | None, doc("The answer's text begins with the prompt's. Not with `logprobs`.")] = None
    best_of: Annotated[Count | None, doc("Only the value of `n` is supported.")] = None
    suffix: Annotated[str | None, doc("Not supported, unless it is empty.")] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=5)] | None,
        doc(
            "So many most likely tokens at each position, and the one that was drawn, with log-probabilities as the "
            "model gives them. Listed are the tokens that a chat would list."
        ),
    ] = None


B = TypeVar("B", bound=Struct)


@cache
def _decoder(kind: type[B]) -> msgspec.json.Decoder[B]:
    return msgspec.json.Decoder(kind)


def decode_body(raw: bytes, kind: type[B]) -> B:
    """Raises InvalidInput; ``field`` is the path inside the body, as ``messages[0].content``."""
    try:
        return _decoded(raw, kind)
    except msgspec.ValidationError as e:
        raise _explained(str(e), raw) from None
    except RecursionError:
        raise InvalidInput("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InvalidInput(f"the body is not valid JSON: {e}") from None


def _decoded(raw: bytes, kind: type[B]) -> B:
    """JSON knows one kind of number, so 5.0 is taken for 5; only a body that has such a number pays for it."""
    decoder = _decoder(kind)
    try:
        body: B = decoder.decode(raw)
    except msgspec.ValidationError as e:
        if not str(e).startswith(FRACTION):
            raise
        try:
            whole = msgspec.json.encode(_whole(msgspec.json.decode(raw)))
        except OverflowError:  # a number of more than 64 bits, which no field takes
            raise e from None
        body = decoder.decode(whole)
    return body


def _whole(value: Any) -> Any:
    """The same with integers for numbers that have no fraction."""
    match value:
        case float():
            return int(value) if value.is_integer() and abs(value) <= MAX_INT64 else value
        case list():
            return [_whole(one) for one in value]
        case dict():
            return {key: _whole(one) for key, one in value.items()}
    return value


FRACTION = "Expected `int"  # ... got `float`
_WHERE = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*?)`)?\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_PART_TYPE = re.compile(r"content\[\d+\]\.type\Z")
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
    tagged = what.startswith("Invalid value") or _PART_TYPE.search(path)
    known = CHOICES.get(path.rpartition(".")[2], ()) if tagged else ()
    known = known[:1] if what.startswith("Invalid enum") else known  # where there is text only
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


def most_urgent(raw: bytes) -> int:
    """The highest priority (higher is more urgent) that a body may have which nobody has parsed."""
    return MAX_PRIORITY if b"priority" in raw or b"\\u" in raw else 0


def clip(text: str, limit: int = 64) -> str:
    """``text`` short enough to be said back to a client, on one line."""
    line = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return line if len(line) <= limit else line[:limit] + "..."
