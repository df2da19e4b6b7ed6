"""JSON Schemas of all that travels, made of the types, and of the rules that the types alone do not tell. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.conductor.gateway import replies
from services.conductor.gateway.body import MAX_CHOICES, ChatBody, CompletionBody
from services.conductor.gateway.objectives import Allowed
from services.conductor.gateway.tokenizing import DetokenizeBody, Detokenized, TokenizeBody, Tokenized
from services.conductor.gateway.unsupported import NEUTRAL, UNUSED_WHEN_NONE

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"
BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
REPLIES = (
    *(replies.Error, replies.Model, replies.ModelList, replies.Health, replies.Version, replies.Ready),
    *(replies.ChatCompletion, replies.ChatChunk, replies.TextCompletion, replies.TextChunk, Tokenized, Detokenized),
)


@dataclass(frozen=True)
class Served:
    """What the description says of this very server. ``vocabulary``: tokens of its model. ``keys``: asked for.
    ``objectives``: what requests may ask for."""

    model: str
    vocabulary: int
    max_body_bytes: int
    keys: bool
    objectives: Allowed = field(default_factory=Allowed)


def schemas(served: Served) -> dict[str, Schema]:
    """By name; they refer to each other inside an OpenAPI document's components."""
    _, made = msgspec.json.schema_components([*BODIES, *REPLIES], ref_template=REF)
    found: dict[str, Schema] = dict(made)
    for name in ("ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody"):
        _name_the_model(found[name], served.model)
        _bound_the_tokens(found[name], served.vocabulary - 1)
    _body(found["ChatBody"], served.vocabulary - 1)
    _body(found["CompletionBody"], served.vocabulary - 1)
    _chat(found["ChatBody"])
    _completion(found["CompletionBody"], served.vocabulary - 1)
    found["TokenizeBody"]["oneOf"] = [_given("prompt", {"type": "string"}), _given("messages", {"type": "array"})]
    found["AssistantMessage"]["anyOf"] = [
        _given("content", {"type": ["string", "array"]}),
        _given("refusal", {"type": "string"}),
        _given("tool_calls", {"type": "array", "minItems": 1}),
    ]
    return found


def _given(name: str, value: Schema) -> Schema:
    return {"properties": {name: value}, "required": [name]}


def _only(schema: Schema, when: Schema, then: Schema) -> None:
    schema.setdefault("allOf", []).append({"if": when, "then": then})


def _replace(schema: Schema, name: str, value: Schema) -> None:
    """The type of a field, whose description and default stay."""
    field = schema["properties"][name]
    schema["properties"][name] = {k: field[k] for k in ("description", "default") if k in field} | value


def _name_the_model(schema: Schema, model: str) -> None:
    required = "model" in schema.get("required", ())
    _replace(schema, "model", {"enum": [model] if required else [model, None]})


def _bound_the_tokens(schema: Schema, highest: int) -> None:
    """No token id is over the model's vocabulary."""
    for name in ("stop_token_ids", "tokens"):
        field = schema["properties"].get(name, {})
        for kind in field.get("anyOf", [field]):
            if "items" in kind:
                kind["items"] = kind["items"] | {"maximum": highest}


def _body(schema: Schema, highest: int) -> None:
    for name, values in NEUTRAL.items():
        if name in schema["properties"] and name not in UNUSED_WHEN_NONE:
            _replace(schema, name, {"enum": [*values, None]})
    biases = next(kind for kind in schema["properties"]["logit_bias"]["anyOf"] if kind["type"] == "object")
    biases["propertyNames"] = {"pattern": f"^0*(?:{up_to(highest)})$", "maxLength": 10}
    _only(schema, _given("stream_options", {"type": "object"}), _given("stream", {"const": True}))


def _chat(schema: Schema) -> None:
    _only(schema, _given("top_logprobs", {"type": "integer", "minimum": 1}), _given("logprobs", {"const": True}))
    for name, choice in UNUSED_WHEN_NONE.items():
        _replace(schema, name, {"type": ["array", "null"]})
        _only(schema, _given(name, {"type": "array", "minItems": 1}), _given(choice, {"const": "none"}))


def _completion(schema: Schema, highest: int) -> None:
    text = {"type": "string", "minLength": 1}
    tokens = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": highest}}
    several = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES}
    _replace(schema, "prompt", {"anyOf": [text, tokens, several | {"items": text}, several | {"items": tokens}]})
    _only(schema, _given("echo", {"const": True}), {"properties": {"logprobs": {"type": "null"}}})


def up_to(highest: int) -> str:
    """A regular expression for the numbers from 0 to ``highest``, for keys that are token ids."""
    digits = str(highest)
    shorter = [f"[0-9]{{1,{len(digits) - 1}}}"] if len(digits) > 1 else []
    below = [
        f"{digits[:i]}[0-{int(digit) - 1}][0-9]{{{len(digits) - i - 1}}}"
        for i, digit in enumerate(digits)
        if int(digit)
    ]
    return "|".join([*shorter, *below, digits])
