"""Fields of OpenAI's API that this server does not act on: a neutral value passes, any other is refused by name."""

from __future__ import annotations

from typing import Any

from services.conductor.gateway.body import Body
from shared.errors import InvalidInput

NEUTRAL: dict[str, tuple[Any, ...]] = {
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
    "moderation": (),
    "suffix": ("",),
}
UNUSED_WHEN_NONE = {"tools": "tool_choice", "functions": "function_call"}
"""What must not be called may be described: that the model will not call it is all that ``"none"`` asks for."""


def refuse_unsupported(body: Body) -> None:
    """Raises InvalidInput for the first field that asks for something this server does not do."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is None or value in neutral or _unused(body, name, value):
            continue
        accepted = " or ".join(repr(one) for one in neutral)
        only = f"; only {accepted} is accepted" if accepted else ""
        raise InvalidInput(f"'{name}' is not supported by this server{only}", field=name)


def _unused(body: Body, name: str, value: Any) -> bool:
    choice = UNUSED_WHEN_NONE.get(name)
    return choice is not None and isinstance(value, list) and getattr(body, choice, None) == "none"
