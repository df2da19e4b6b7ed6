"""What the server answers, as types: for the description of the API, and for the tests that hold answers against it.

The answers themselves are written piece by piece where they arise (see :mod:`services.conductor.gateway.shapes`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from services.conductor.gateway.body import doc

Amount = Annotated[int, Meta(ge=0)]
Created = Annotated[int, Meta(ge=0, description="Unix seconds.")]
Finish = Annotated[
    Literal["stop", "length"], doc("`stop`: by the model, a stop string or a stop token; `length`: by `max_tokens`.")
]


class Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    """Every field is there, and no other, but for those that may be left out."""


class Fault(Strict):
    message: Annotated[str, doc("For people: names field, value and limit.")]
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: Annotated[str | None, doc("The field or header that is wrong, as `messages[0].content`.")]
    code: Annotated[str, doc("For programs: branch on this.")]
    reason: Annotated[
        str | UnsetType,
        doc(
            "Of 429 and 503. What is short: `ttft` or `tbt`, an objective that would be missed; `no_room` in decode's "
            "KV pools or batches; `backlog`, `tokenizer`: this server. Who is missing: `no_prefill`, `no_decode`, "
            "`no_instance`, `bus_down`; or `starting`, `draining`, `tokenizer_mismatch`."
        ),
    ] = UNSET
    predicted_ms: Annotated[int | UnsetType, doc("Of 429 for an objective: what was predicted.")] = UNSET
    limit_ms: Annotated[int | UnsetType, doc("Of 429 for an objective: what it must not exceed.")] = UNSET


class Error(Strict):
    """Every error, on every path, has this form."""

    error: Fault


class Model(Strict):
    id: str
    object: Literal["model"]
    created: Created
    owned_by: str
    max_model_len: Annotated[int | UnsetType, doc("Tokens of the context; left out while no instance has told it.")] = (
        UNSET
    )


class ModelList(Strict):
    object: Literal["list"]
    data: list[Model]


class PromptDetails(Strict):
    cached_tokens: Annotated[Amount, doc("Prompt tokens whose KVCache was loaded rather than computed.")]


class Usage(Strict):
    """Each prompt counts once, however many answers it has."""

    prompt_tokens: Amount
    completion_tokens: Amount
    total_tokens: Amount
    prompt_tokens_details: PromptDetails


class TokenLogprob(Strict):
    token: Annotated[str, doc("Its text; bytes that are no whole characters as `\\xf0`.")]
    logprob: Annotated[float, Meta(le=0)]
    bytes: Annotated[list[Annotated[int, Meta(ge=0, le=255)]] | None, doc("Its text's bytes; null where it has none.")]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Strict):
    content: list[ChosenLogprob]
    refusal: None


class TextLogprobs(Strict):
    tokens: list[str]
    token_logprobs: list[Annotated[float, Meta(le=0)]]
    top_logprobs: list[dict[str, float]]
    text_offset: Annotated[list[Amount], doc("Characters of the answer before each token.")]


class Said(Strict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Strict):
    index: Amount
    message: Said
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class TextChoice(Strict):
    index: Amount
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class Delta(Strict):
    role: Annotated[Literal["assistant"] | UnsetType, doc("In a choice's first chunk.")] = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Strict):
    index: Amount
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class TextChunkChoice(Strict):
    index: Amount
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class Answered(Strict):
    id: str
    created: Created
    model: str
    system_fingerprint: Annotated[str, doc("The same as long as model, engine and type of the instances are.")]


class ChatCompletion(Answered):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class TextCompletion(Answered):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


StreamUsage = Annotated[
    Usage | UnsetType | None,
    doc("Only with `stream_options.include_usage`: null but in the last chunk, which has no choices."),
]


class ChatChunk(Answered):
    """Data of an event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: StreamUsage = UNSET


class TextChunk(Answered):
    """Data of an event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: StreamUsage = UNSET


class Health(Strict):
    status: Literal["ok"]


class Version(Strict):
    version: str


class Ready(Strict):
    ready: Annotated[bool, doc("Whether a request would be served now.")]
    reasons: Annotated[list[str], doc("Why not: `no_prefill`, `no_decode`, `bus_down`, `starting`, `draining` ...")]
    degraded: Annotated[list[str], doc("What is lost without stopping service: `metadata_down`, `api_keys_invalid`.")]
    error: Annotated[Fault | UnsetType, doc("Beside a status of 503.")] = UNSET
