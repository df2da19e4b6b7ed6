"""Chat templates as model folders carry them: Jinja text, rendered in a sandbox, metered."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.conductor.gateway.meter import FILTERS, METER, Meter, TooMuch, metered
from shared.errors import ConfigError, InvalidInput

# What a template may do wrong with a conversation that it was not made for.
REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class GenerationTag(Extension):
    """``{% generation %}`` marks the model's own words for training; for serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Nothing of the process is reachable, and no operator makes more than the meter allows."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = context.resolve(METER)
        if isinstance(meter, Meter):
            meter.binop(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter it escapes nothing for HTML; the parameters are those templates of the hub count on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _shown(value: Any) -> Any:
    """A null content is shown as nothing; to the template itself it stays null, which some ask for."""
    return "" if value is None else value


def _environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], finalize=_shown
    )
    environment.filters |= {"tojson": _tojson, **FILTERS}
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


class ChatTemplate:
    """``tokens``: the special tokens by role (``bos_token`` ...), which templates name. Raises ConfigError when the
    template does not compile."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(metered(environment.parse(source), environment))
        except TemplateError as e:
            raise ConfigError(f"the model's chat template does not compile: {e}") from e

    def render(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True) -> str:
        """The prompt, by default up to where the model answers.

        Raises InvalidInput for a conversation that the template refuses, or of which it makes out of all proportion.
        """
        size = len(msgspec.json.encode(messages))
        try:
            return self._render(messages, generation_prompt, Meter(size))
        except TooMuch as e:
            raise InvalidInput(
                f"the model's chat template makes too much of these messages: {e}", field="messages"
            ) from e
        except TypeError as e:  # `'...' + message.content` where that is null
            if all(message.get("content") is not None for message in messages):
                raise _refused(e) from e
        except REFUSALS as e:
            raise _refused(e) from e
        return self.render([_worded(message) for message in messages], generation_prompt=generation_prompt)

    def _render(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool, meter: Meter) -> str:
        names = {**self._tokens, "tools": None, "documents": None, METER: meter}
        pieces: list[str] = []
        for piece in self._template.generate(messages=messages, add_generation_prompt=generation_prompt, **names):
            meter.output(len(piece))
            pieces.append(piece)
        return "".join(pieces)


def _refused(error: Exception) -> InvalidInput:
    return InvalidInput(f"the model's chat template refuses these messages: {error}", field="messages")


def _worded(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "content": _shown(message.get("content"))}
