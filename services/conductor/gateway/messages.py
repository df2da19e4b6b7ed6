"""A conversation as it travels, strictly typed by role, and as a chat template takes it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.errors import InvalidInput

Conversation = list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ("text", "refusal")
CHOICES = {"role": ROLES, "type": PARTS}  # of tagged objects, to be named when a tag is another


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of text; the pieces of a message follow each other with nothing between."""

    text: str


class OnlyTextPart(Struct, forbid_unknown_fields=True):
    """The same where there is no other kind: a tag outside a union might be left out."""

    type: Literal["text"]
    text: str


class RefusalPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """What an assistant said instead of an answer; taken as text."""

    refusal: str


Text = Annotated[str | list[OnlyTextPart], Meta(description="Text, or a list of text parts.")]
Name = Annotated[str | None, Meta(description="Tells apart speakers of one role, where the chat template shows it.")]


class FunctionCall(Struct, forbid_unknown_fields=True):
    name: str
    arguments: Annotated[str, Meta(description="JSON, which the chat template gets as an object where it is one.")]


class ToolCall(Struct, forbid_unknown_fields=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class _Message(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role"):
    name: Name = None
    # Some clients send every field of every role, as null.
    refusal: None = None
    annotations: None = None
    audio: None = None
    tool_calls: None = None
    tool_call_id: None = None
    function_call: None = None


class SystemMessage(_Message, kw_only=True, tag="system"):
    content: Text


class DeveloperMessage(_Message, kw_only=True, tag="developer"):
    """Taken as a system message."""

    content: Text


class UserMessage(_Message, kw_only=True, tag="user"):
    content: Text


class ToolMessage(_Message, kw_only=True, tag="tool"):
    """The result of a tool call that the assistant made before."""

    content: Text
    tool_call_id: str  # type: ignore[assignment]


class AssistantMessage(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role", tag="assistant"):
    """``content`` may be null beside tool calls or a refusal. What an answer carries may be sent back as it came."""

    content: str | list[TextPart | RefusalPart] | None = None
    name: Name = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    annotations: list[dict[str, Any]] | None = None
    audio: None = None
    tool_call_id: None = None
    function_call: None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


def conversation(messages: Sequence[ChatMessage]) -> Conversation:
    """What a chat template takes. Raises InvalidInput, naming the message."""
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _turn(message: ChatMessage, where: str) -> dict[str, Any]:
    named = {"name": message.name} if message.name else {}
    match message:
        case AssistantMessage():
            turn = {"role": "assistant", "content": _said(message, where)}
            calls = [_call(call) for call in message.tool_calls or ()]
            return turn | named | ({"tool_calls": calls} if calls else {})
        case ToolMessage():
            return {"role": "tool", "content": _text(message.content), "tool_call_id": message.tool_call_id} | named
        case UserMessage():
            return {"role": "user", "content": _text(message.content)} | named
        case _:
            return {"role": "system", "content": _text(message.content)} | named


def _said(message: AssistantMessage, where: str) -> str | None:
    if message.content is not None:
        return _text(message.content)
    if message.refusal is not None:
        return message.refusal
    if message.tool_calls:
        return None
    raise InvalidInput(f"'{where}.content' may only be null beside 'tool_calls'", field=f"{where}.content")


def _text(content: str | Sequence[TextPart | OnlyTextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _call(call: ToolCall) -> dict[str, Any]:
    """Templates print arguments as JSON, so they need the object; what a model got wrong stays the text it was."""
    arguments: Any = call.function.arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        arguments = parsed
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
