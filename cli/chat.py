"""``mooncake chat``: talk to the model; shows the time to first token, tokens per second and cached tokens."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.text import Text

from cli.api import DEFAULT_URL, Api, ApiError, Usage, hinted
from cli.console import err, out, print_json

HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer."


@dataclass(frozen=True)
class Turn:
    """One answer and how it came. Times in seconds; ``tokens_per_s`` counts from the first token."""

    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    tokens_per_s: float

    def summary(self) -> str:
        return (
            f"first token {self.ttft_s:.2f} s, {self.tokens_per_s:.1f} tokens/s, "
            f"{self.completion_tokens} tokens, prompt {self.prompt_tokens} of which {self.cached_tokens} cached"
        )


def ask(api: Api, body: dict[str, Any], show: Callable[[str], None]) -> Turn:
    """One turn; ``show`` gets the text as it comes. Raises ApiError."""
    begin = time.monotonic()
    first = 0.0
    parts: list[str] = []
    finish, usage = "", Usage()
    for delta in api.chat(body):
        if delta.text:
            first = first or time.monotonic()
            parts.append(delta.text)
            show(delta.text)
        finish, usage = delta.finish or finish, delta.usage or usage
    end = time.monotonic()
    first = first or end
    tokens = usage.completion
    return Turn(
        text="".join(parts),
        finish=finish,
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        completion_tokens=tokens,
        ttft_s=first - begin,
        total_s=end - begin,
        tokens_per_s=(tokens - 1) / (end - first) if tokens > 1 and end > first else 0.0,
    )


class Conversation:
    """The messages so far, and how the next ones are asked for."""

    def __init__(self, api: Api, model: str, system: str, options: dict[str, Any]) -> None:
        self._api = api
        self._options = {"model": model, **options}
        self._system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str, show: Callable[[str], None]) -> Turn:
        """Adds both messages once the answer is complete: one that failed leaves the conversation as it was."""
        messages = [*self.messages, {"role": "user", "content": text}]
        turn = ask(self._api, {**self._options, "messages": messages}, show)
        self.messages = [*messages, {"role": "assistant", "content": turn.text}]
        return turn


@click.command()
@click.option("--url", default=DEFAULT_URL, envvar="MOONCAKE_URL", show_default=True, help="The conductor.")
@click.option("--model", default="", help="A served model; default: the first one.")
@click.option("--system", default="", help="System message.")
@click.option("-m", "--message", multiple=True, help="Say this and leave; several times for several turns.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Longest answer, in tokens.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=None, help="Makes sampled answers repeatable.")
@click.option("--api-key", default="", envvar="MOONCAKE_API_KEY", help="Key, where the conductor asks for one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document a turn, nothing else.")
def chat(
    url: str,
    model: str,
    system: str,
    message: Sequence[str],
    max_tokens: int,
    temperature: float,
    seed: int | None,
    api_key: str,
    as_json: bool,
) -> None:
    """Talk to the model. In a pipe, what comes on stdin is said as one message."""
    api = Api(url, api_key)
    try:
        model = model or _first_model(api)
        options = {"max_tokens": max_tokens, "temperature": temperature} | ({} if seed is None else {"seed": seed})
        conversation = Conversation(api, model, system, options)
        if not message and not sys.stdin.isatty():
            message = [sys.stdin.read().strip()]
        if message:
            for text in message:
                _say(conversation, text, as_json)
        else:
            _talk(conversation, model, as_json)
    except ApiError as error:
        raise click.ClickException(hinted(error)) from None


def _first_model(api: Api) -> str:
    models = api.models()
    if not models:
        raise ApiError("no model is served yet (`mooncake status` shows the instances)", 503)
    return next(iter(models))


def _say(conversation: Conversation, text: str, as_json: bool) -> None:
    turn = conversation.say(text, (lambda _text: None) if as_json else _print)
    if as_json:
        print_json(asdict(turn))
        return
    print(flush=True)
    err.print(Text(turn.summary(), style="dim"))


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _talk(conversation: Conversation, model: str, as_json: bool) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and editing

    err.print(Text(f"{model}. {HELP}", style="dim"))
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            err.print(Text(HELP, style="dim"))
        elif text:
            _answer(conversation, text, as_json)


def _answer(conversation: Conversation, text: str, as_json: bool) -> None:
    """A turn that failed or was stopped does not end the conversation."""
    try:
        _say(conversation, text, as_json)
    except KeyboardInterrupt:
        err.print(Text("\nstopped", style="dim"))
    except ApiError as error:
        err.print(Text(error.message, style="red"))
