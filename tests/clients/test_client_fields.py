"""Every field that the `openai` client can send is known here: acted on, ignored, or refused by name for what it is."""

from __future__ import annotations

import msgspec
import pytest
from openai.types import completion_create_params as text
from openai.types.chat import completion_create_params as chat

from services.conductor.gateway.body import Body, ChatBody, CompletionBody


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat.CompletionCreateParamsNonStreaming, ChatBody),
        (chat.CompletionCreateParamsStreaming, ChatBody),
        (text.CompletionCreateParamsNonStreaming, CompletionBody),
        (text.CompletionCreateParamsStreaming, CompletionBody),
    ],
)
def test_no_field_of_the_client_is_unknown(theirs: type, ours: type[Body]) -> None:
    sent = {name for kind in theirs.__mro__ for name in getattr(kind, "__annotations__", {})}
    sent |= set(getattr(theirs, "__required_keys__", ())) | set(getattr(theirs, "__optional_keys__", ()))
    known = {field.encode_name for field in msgspec.structs.fields(ours)}
    assert len(sent) > 10
    assert sent - known == set()
