"""Fields of OpenAI's API that this server does not act on: a neutral value passes, any other is refused by name."""

from __future__ import annotations

from typing import Any

from services.conductor.gateway.body import Body, ChatMessage, TextPart
from shared.errors import InvalidInput

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
}
NEUTRAL_IN_PART: dict[str, tuple[Any, ...]] = {"image_url": (), "input_audio": (), "file": (), "refusal": ()}


def refuse_unsupported(body: Body | ChatMessage | TextPart, where: str = "") -> None:
    """Raises InvalidInput for the first field that asks for something this server does not do."""
    table = NEUTRAL if isinstance(body, Body) else NEUTRAL_IN_MESSAGE
    for name, neutral in (NEUTRAL_IN_PART if isinstance(body, TextPart) else table).items():
        value = getattr(body, name, None)
        if value is not None and not any(same(value, one) for one in neutral):
            accepted = " or ".join(repr(one) for one in neutral)
            only = f"; only {accepted} is accepted" if accepted else ""
            raise InvalidInput(f"'{where}{name}' is not supported by this server{only}", field=where + name)


def same(value: Any, neutral: Any) -> bool:
    """Equal, and of the same kind: 0 is not False (a completion's ``logprobs: 0`` asks for something)."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
