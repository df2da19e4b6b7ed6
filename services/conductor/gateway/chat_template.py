"""Chat templates as model folders carry them: Jinja text, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError, InvalidInput


class GenerationTag(Extension):
    """``{% generation %}`` marks the model's own words for training; for serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, indent: int | None = None, **more: Any) -> str:
    """Unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=more.get("ensure_ascii", False), indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


class ChatTemplate:
    """``tokens``: the special tokens by role (``bos_token`` ...), which templates name. Raises ConfigError when the
    template does not compile."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as e:
            raise ConfigError(f"the model's chat template does not compile: {e}") from e

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the model answers. Raises InvalidInput for a conversation that it refuses."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as e:
            raise InvalidInput(f"the model's chat template refuses these messages: {e}", field="messages") from e
