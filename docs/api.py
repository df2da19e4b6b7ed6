"""Writes the reference part of ``docs/api.md`` from the description that the server itself gives (``make docs``)."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from services.conductor.gateway.openapi import document
from services.conductor.gateway.schemas import Schema, Served
from services.conductor.settings import ConductorSettings

PAGE = Path(__file__).parent / "api.md"
BEGIN, END = "<!-- reference: written by docs/api.py -->", "<!-- reference end -->"
HEAD = ("| field | type | |", "|---|---|---|")
MODEL = "the served model"
REQUESTS = ("ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody")
MESSAGES = ("SystemMessage", "AssistantMessage", "ToolMessage", "ToolCall", "FunctionCall", "StreamOptions")
ANSWERS = ("ChatCompletion", "ChatChunk", "TextCompletion", "TextChunk", "Usage", "ChosenLogprob", "TextLogprobs")
OTHERS = ("Tokenized", "Detokenized", "Model", "Ready", "Fault")


def reference() -> list[str]:
    described = document(Served(MODEL, 2**32, ConductorSettings().max_body_bytes, keys=True))
    schemas = described["components"]["schemas"]
    out = ["", "## Routes", "", "| route | | errors |", "|---|---|---|"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            errors = " ".join(status for status in operation["responses"] if status != "200")
            key = "" if operation["security"] else " (no key)"
            out.append(f"| `{method.upper()} {path}` | {operation['summary']}{key} | {errors} |")
    out += ["", "## Errors by status", "", "| status | |", "|---|---|"]
    for status, answer in described["components"]["responses"].items():
        out.append(f"| {status} | {answer['description']} |")
    out += ["", "## Request headers", "", "| header | type | |", "|---|---|---|"]
    for parameter in described["components"]["parameters"].values():
        out.append(f"| `{parameter['name'].lower()}` | {kind(parameter['schema'])} | {parameter['description']} |")
    chat, text = (schemas[name]["properties"] for name in ("ChatBody", "CompletionBody"))
    both = [field for field in chat if text.get(field) == chat[field]]
    out += ["", "## Requests", "", "A field that is not required may be null, too: as if it were not given."]
    out += ["", "### Both kinds of completions", "", *HEAD, *(line(field, schemas["ChatBody"]) for field in both)]
    for name in REQUESTS + MESSAGES:
        out += table(name, schemas[name], skip=both if name in ("ChatBody", "CompletionBody") else ())
    out += ["", "## Answers", "", "Every field is there, unless it says otherwise."]
    for name in ANSWERS + OTHERS:
        out += table(name, schemas[name], answer=True)
    return out


def table(name: str, schema: Schema, *, skip: Collection[str] = (), answer: bool = False) -> list[str]:
    """One line per field."""
    out = ["", f"### {name}", ""]
    if "description" in schema:
        out += [schema["description"].replace("``", "`"), ""]
    shown = [f for f, value in schema["properties"].items() if f not in skip and value.get("type") != "null"]
    return [*out, *HEAD, *(line(field, schema, answer) for field in shown)]


def line(field: str, schema: Schema, answer: bool = False) -> str:
    value, required = schema["properties"][field], field in schema.get("required", ())
    note = "" if required == answer else "Required. " if required else "May be left out. "
    null = " or null" if answer and {"type": "null"} in value.get("anyOf", ()) else ""
    return f"| `{field}` | {cell(kind(value) + null)} | {cell(note + value.get('description', ''))} |"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def kind(schema: Schema) -> str:
    """A type in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if name in REQUESTS + MESSAGES + ANSWERS + OTHERS else name
    if "enum" in schema:
        return " or ".join(_value(value) for value in schema["enum"] if value is not None) or "null"
    kinds = [kind(one) for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    if kinds:
        return " or ".join(dict.fromkeys(kinds))
    types = [schema["type"]] if isinstance(schema["type"], str) else [t for t in schema["type"] if t != "null"]
    of = f" of {kind(schema['items'])}" if "items" in schema else ""
    return " or ".join(types) + of + limits(schema)


def _value(value: Any) -> str:
    return (
        MODEL if value == MODEL else f"`{str(value).lower() if isinstance(value, bool) else value!r}`".replace("'", '"')
    )


def limits(schema: Schema) -> str:
    words = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "minLength": "length >=",
        "maxLength": "length <=",
    }
    words |= {"minItems": "at least", "maxItems": "at most", "maxProperties": "at most"}
    shown = [f"{word} {schema[name]}" for name, word in words.items() if name in schema and abs(schema[name]) < 2**31]
    return f", {', '.join(shown)}" if shown else ""


def page(text: str) -> str:
    """The page with the part between the markers written anew."""
    head, rest = text.split(BEGIN)
    return "\n".join([head + BEGIN, *reference(), "", END]) + rest.split(END)[1]


def main() -> int:
    old = PAGE.read_text("utf-8")
    new = page(old)
    if "--check" in sys.argv:
        if old != new:
            print("docs/api.md: the reference is stale; run make docs", file=sys.stderr)
        return int(old != new)
    PAGE.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
