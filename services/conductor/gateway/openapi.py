"""The OpenAPI 3.1 description of the HTTP API, made of the same types that requests are read with. Pure."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.conductor.gateway.http import JSON, MAX_HEADER, MAX_HEADERS, MAX_LINE
from services.conductor.gateway.objectives import TBT, TTFT
from services.conductor.gateway.schemas import Schema, Served, schemas

VERSION = importlib.metadata.version("mooncake-mesh")
SSE_TYPE = "text/event-stream"
METRICS = ("text/plain", "application/openmetrics-text")

STATUSES = {
    400: "The request is wrong: `invalid_input`, `context_length_exceeded`, `does_not_fit`, `bad_request`.",
    401: "No API key, or one that is not known: `invalid_api_key`.",
    404: "The model is not served here: `model_not_found`.",
    405: "The path has other methods, which `Allow` names: `method_not_allowed`.",
    408: "The head or the body did not arrive in time: `request_timeout`.",
    413: "The body is too large: `request_too_large`.",
    414: f"The request line is longer than {MAX_LINE} bytes: `uri_too_long`.",
    415: "The body is not JSON, or is compressed: `unsupported_media_type`.",
    417: "`Expect` is not `100-continue`: `expectation_failed`.",
    429: "Capacity is short: `contended`. `Retry-After` predicts when it is not.",
    431: f"A header is longer than {MAX_HEADER} bytes, or there are more than {MAX_HEADERS}: `headers_too_large`.",
    500: "A bug: `internal`.",
    502: "The bounded number of attempts failed: `attempt_failed`, or what failed them.",
    503: "No instance, no bus, or shutting down: `unavailable`, `bus_down` ...",
    504: "The whole answer took too long: `deadline_exceeded`.",
}
EVERYWHERE = (400, 405, 408, 414, 431, 500)
WITH_BODY = (413, 415, 417, 429)
WITH_TOKENS = (404, 502, 503, 504)

PARAMETERS: dict[str, tuple[str, Schema]] = {
    "X-Request-Id": (
        "Echoed where it is 1 to 128 of `A-Za-z0-9._:-`; any other is replaced by a fresh one.",
        {"type": "string"},
    ),
    TTFT: ("Objective of this request for the time to its first token, in milliseconds.", {"type": "integer"}),
    TBT: ("Objective of this request for the time between its tokens, in milliseconds.", {"type": "integer"}),
}
HEADERS = {
    "X-Request-Id": {"description": "Of every answer.", "required": True, "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer", "minimum": 1}},
    "Retry-After-Ms": {"description": "Milliseconds.", "required": True, "schema": {"type": "integer", "minimum": 1}},
    "Allow": {"description": "The methods that the path has.", "required": True, "schema": {"type": "string"}},
}


@dataclass(frozen=True)
class Operation:
    """``reply``: schema of the answer, or a text's content types. ``chunk``: schema of a streamed event."""

    path: str
    name: str
    tag: str
    summary: str
    reply: str | tuple[str, ...]
    body: str = ""
    chunk: str = ""
    keyed: bool = True
    statuses: tuple[int, ...] = ()
    examples: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return "post" if self.body else "get"

    @property
    def errors(self) -> list[int]:
        found = {*EVERYWHERE, *self.statuses}
        found |= {*WITH_BODY} if self.body else set()
        found |= {*WITH_TOKENS} if self.chunk else set()
        return sorted(found | ({401} if self.keyed else set()))


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]


def operations(model: str) -> list[Operation]:
    """In the order of the documentation. ``model``: named in the examples."""
    tokenize = {"prompt": {"model": model, "prompt": "Hello"}, "chat": {"model": model, "messages": MESSAGES}}
    chat = {"model": model, "messages": MESSAGES, "max_tokens": 64}
    text = {"model": model, "prompt": "The capital of France is", "max_tokens": 16}
    converts: list[Operation] = []
    for prefix, suffix in (("", ""), ("/v1", "V1")):
        converts += [
            Operation(
                f"{prefix}/tokenize",
                f"tokenize{suffix}",
                "Tokens",
                "Token ids of a text or conversation",
                "Tokenized",
                "TokenizeBody",
                statuses=(404,),
                examples=tokenize,
            ),
            Operation(
                f"{prefix}/detokenize",
                f"detokenize{suffix}",
                "Tokens",
                "The text of token ids",
                "Detokenized",
                "DetokenizeBody",
                statuses=(404,),
                examples={"ids": {"model": model, "tokens": [1, 2, 3]}},
            ),
        ]
    return [
        Operation(
            "/v1/chat/completions",
            "createChatCompletion",
            "Completions",
            "Answer a conversation",
            "ChatCompletion",
            "ChatBody",
            "ChatChunk",
            examples={"whole": chat, "streamed": chat | {"stream": True}},
        ),
        Operation(
            "/v1/completions",
            "createCompletion",
            "Completions",
            "Continue a text",
            "TextCompletion",
            "CompletionBody",
            "TextChunk",
            examples={"whole": text, "streamed": text | {"stream": True}},
        ),
        *converts,
        Operation("/v1/models", "listModels", "Models", "The served model, as a list", "ModelList"),
        Operation("/v1/models/{model}", "retrieveModel", "Models", "The served model", "Model", statuses=(404,)),
        Operation("/version", "version", "Server", "Version of the server", "Version"),
        Operation("/health", "health", "Server", "The process runs", "Health", keyed=False),
        Operation(
            "/ready", "ready", "Server", "Whether a request would be served", "Ready", keyed=False, statuses=(503,)
        ),
        Operation("/cluster", "cluster", "Server", "Instances, agents, index and counters", "Cluster"),
        Operation(
            "/trace/{request}", "trace", "Server", "The spans of one of the last requests", "Trace", statuses=(404,)
        ),
        Operation("/metrics", "metrics", "Server", "Metrics for Prometheus", METRICS, keyed=False),
        Operation("/openapi.json", "openapi", "Server", "This description", "Description", keyed=False),
    ]


def document(served: Served) -> dict[str, Any]:
    """The whole description, as of a server that serves ``served``."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations(served.model):
        paths[operation.path] = {operation.method: _operation(operation, served)}
    loose: dict[str, Schema] = {
        "Cluster": {"type": "object", "description": "For people and `mooncake status`; may grow."},
        "Trace": {
            "type": "object",
            "required": ["request", "trace", "spans", "missing"],
            "description": "For people and `mooncake trace`; may grow.",
        },
        "Description": {"type": "object", "required": ["openapi", "info", "paths"]},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Mooncake Mesh",
            "version": VERSION,
            "description": "OpenAI's API, served by a mesh of prefill and decode instances.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas(served) | loose,
            "responses": {str(status): _error(status, text) for status, text in STATUSES.items()},
            "parameters": {name: _parameter(name, *rest, served) for name, rest in PARAMETERS.items()},
            "headers": HEADERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "`--api-keys`"}},
        },
    }


def _operation(operation: Operation, served: Served) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": _parameters(operation, served),
        "security": [{"key": []}] if operation.keyed and served.keys else [],
        "responses": {"200": _success(operation), **{str(s): _response(operation, s) for s in operation.errors}},
    }
    if operation.body:
        examples = {name: {"value": value} for name, value in operation.examples.items()}
        made["requestBody"] = {
            "required": True,
            "description": f"Not compressed; at most {served.max_body_bytes} bytes.",
            "content": {JSON: {"schema": _ref(operation.body), "examples": examples}},
        }
    return made


def _parameters(operation: Operation, served: Served) -> list[dict[str, Any]]:
    names = list(PARAMETERS) if operation.chunk else ["X-Request-Id"]
    found: list[dict[str, Any]] = [{"$ref": f"#/components/parameters/{name}"} for name in names]
    if "{model}" in operation.path:
        description = "As `/v1/models` lists it; it may have slashes, as they are or percent-encoded."
        schema = {"enum": [served.model]}
        found.append({"name": "model", "in": "path", "required": True, "description": description, "schema": schema})
    if "{request}" in operation.path:
        description = "The id of an answer, or an `x-request-id`, of one of the last requests."
        text: Schema = {"type": "string", "minLength": 1}
        found.append({"name": "request", "in": "path", "required": True, "description": description, "schema": text})
    return found


def _parameter(name: str, description: str, schema: Schema, served: Served) -> dict[str, Any]:
    if (range := served.objectives.named().get(name)) is not None:
        schema = schema | {"minimum": range.least, "maximum": range.most}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _success(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any]
    if isinstance(operation.reply, str):
        content = {JSON: {"schema": _ref(operation.reply)}}
    else:
        content = {kind: {"schema": {"type": "string"}} for kind in operation.reply}
    if operation.chunk:
        content[SSE_TYPE] = {"schema": _event(operation.chunk)}
    return {"description": operation.summary, "headers": _headers(["X-Request-Id"]), "content": content}


def _event(chunk: str) -> Schema:
    """One event of a stream, as its readers see it."""
    how = (
        f"With `stream: true`: events whose data is a `{chunk}`, then one with `[DONE]`; a stream that fails after its "
        "first token ends with an `Error` instead."
    )
    text = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [_ref(chunk), _ref("Error")]}}
    data = {"anyOf": [{"const": "[DONE]"}, text]}
    return {"type": "object", "description": how, "properties": {"data": data}, "required": ["data"]}


def _response(operation: Operation, status: int) -> dict[str, Any]:
    if operation.name == "ready" and status == 503:
        return _error(503, "A request would not be served now.", "Ready")
    return {"$ref": f"#/components/responses/{status}"}


def _error(status: int, description: str, schema: str = "Error") -> dict[str, Any]:
    names = ["X-Request-Id"]
    names += ["Retry-After", "Retry-After-Ms"] if status in (429, 503) else []
    names += ["Allow"] if status == 405 else []
    return {"description": description, "headers": _headers(names), "content": {JSON: {"schema": _ref(schema)}}}


def _headers(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
