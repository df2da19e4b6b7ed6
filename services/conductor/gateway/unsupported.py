"""Fields of OpenAI's API that this server does not act on: a neutral value passes, any other is refused by name."""

from __future__ import annotations

from typing import Any

from services.conductor.gateway.body import Body
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


def refuse_unsupported(body: Body) -> None:
    """Raises InvalidInput for the first field that asks for something this server does not do."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and not any(same(value, one) for one in neutral):
            accepted = " or ".join(repr(one) for one in neutral)
            only = f"; only {accepted} is accepted" if accepted else ""
            raise InvalidInput(f"'{name}' is not supported by this server{only}", field=name)


def same(value: Any, neutral: Any) -> bool:
    """Equal, and of the same kind: 0 is not False (a completion's ``logprobs: 0`` asks for something)."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
