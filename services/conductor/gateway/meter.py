"""Bounds on what a template may do with one conversation: characters, size of numbers, CPU time."""

from __future__ import annotations

import time
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.visitor import NodeTransformer

METER = "__meter"  # the name under which a template's own code finds it
EXPANSION = 8  # characters that a template may make of a byte of its conversation
ROOM = 2**20  # characters besides
STEPS_PER_LOOK = 16  # a step may hold a filter over a whole list
CPU_SECONDS = 10.0
MAX_BITS = 4096  # of a number
SEQUENCES = (str, list, tuple)


class TooMuch(TemplateError):
    """The template's work was out of proportion; the message says which bound it met."""


class Meter:
    """Of one rendering. ``size``: bytes of the conversation. Every method raises TooMuch."""

    def __init__(self, size: int) -> None:
        self._most = EXPANSION * size + ROOM
        self._out = 0
        self._steps = 0
        self._until = time.thread_time() + CPU_SECONDS

    def output(self, characters: int) -> None:
        self._out += characters
        self._check(self._out)
        self.step()

    def step(self) -> bool:
        """Once per iteration and macro call. True, so that it can stand before a condition."""
        self._steps += 1
        if self._steps % STEPS_PER_LOOK == 0 and time.thread_time() > self._until:
            raise TooMuch(f"more than {CPU_SECONDS:g} s of work")
        return True

    def text(self, value: Any) -> Any:
        """``value``, unless it has grown too long."""
        if isinstance(value, str):
            self._check(len(value))
        return value

    def binop(self, operator: str, left: Any, right: Any) -> None:
        """Before the operator is applied."""
        if isinstance(left, SEQUENCES) or isinstance(right, SEQUENCES):
            self._check(_length(left) + _length(right) if operator == "+" else _length(left) * _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (bits * max(right, 0) if operator == "**" else bits + right.bit_length()) > MAX_BITS:
                raise TooMuch(f"a number of more than {MAX_BITS} bits")

    def _check(self, characters: int) -> None:
        if characters > self._most:
            raise TooMuch(f"more than {self._most} characters")


def _length(value: Any) -> int:
    """Of a text or list; a number stands for how often one is repeated."""
    if isinstance(value, SEQUENCES):
        return len(value)
    return max(value, 0) if isinstance(value, int) else 0


class _Metering(NodeTransformer):
    """Puts the calls of the meter into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step")))
        if node.test is not None:
            node.test = nodes.And(_call("step"), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step")))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _call("text", self.generic_visit(node))

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [one if isinstance(one, nodes.TemplateData) else _call("text", one) for one in node.nodes]
        return node


def metered(template: nodes.Template, environment: Environment) -> nodes.Template:
    """The same template, which calls its meter in every loop and macro, and for every text that it prints or joins."""
    _Metering().visit(template)
    template.set_environment(environment)
    template.set_lineno(1)
    return template


def _call(method: str, *arguments: nodes.Node) -> nodes.Filter:
    """As a filter, which the sandbox calls at once; calls of objects it looks into first."""
    return nodes.Filter(nodes.Name(METER, "load"), _NAMES[method], list(arguments), [], None, None)


_NAMES = {"step": "__step", "text": "__text"}
FILTERS = {"__step": Meter.step, "__text": Meter.text}
