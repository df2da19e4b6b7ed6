"""When a mesh counts as ready, and what is said then."""

from __future__ import annotations

import shlex

import click
from rich.text import Text

from cli.api import Api, ApiError
from cli.console import out, print_json
from cli.plan import Plan

QUESTION = "What is the capital of France?"
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def url_of(host: str, port: int) -> str:
    """A URL that works on this machine, also for ``0.0.0.0`` and IPv6."""
    host = WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Ready:
    """Looks at ``/ready`` until a request would be served and every instance that was started is there."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.url = url_of(plan.settings.host, plan.wiring.port)
        self.reason = "the conductor does not answer yet"
        self._api = Api(self.url, timeout=5)

    def look(self) -> bool:
        """True once it is; else ``reason`` says why not."""
        try:
            status, body = self._api.get_any("/ready")
            self.reason = "" if status == 200 else str(body.get("error") or body)
            return status == 200 and self._complete()
        except ApiError as error:
            self.reason = error.message
            return False

    def _complete(self) -> bool:
        """Where API keys hide the cluster, ``/ready`` has to do."""
        if self.plan.settings.api_keys:
            return True
        here, wanted = len(self._api.get("/cluster").get("instances") or []), len(self.plan.nodes())
        self.reason = f"{here} of {wanted} instances are registered"
        return here >= wanted

    def say(self, seconds: float, as_json: bool) -> None:
        """On stdout: one JSON document, or a few lines with a command to copy."""
        served, settings = self.plan.wiring.served, self.plan.settings
        if as_json:
            counts = {"prefill": settings.prefill, "decode": settings.decode}
            run = {"url": self.url, "model": served, "mesh_id": self.plan.wiring.mark, "ready_s": round(seconds, 3)}
            print_json({"ready": True, **run, **counts, **self.plan.wiring.tls})
            return
        out.print()
        out.print(Text(f"Ready after {seconds:.1f} s at {self.url}", style="bold green"), soft_wrap=True)
        out.print(Text(f"{served}: {settings.prefill} prefill, {settings.decode} decode. Try:\n"))
        click.echo(self.curl())
        click.echo(f"\nmooncake chat --url {self.url}\nmooncake status --url {self.url}\n\nCtrl-C stops all of it.\n")

    def curl(self) -> str:
        """A streamed chat completion, to paste into a shell."""
        message = f'{{"role": "user", "content": "{QUESTION}"}}'
        body = f'{{"model": "{self.plan.wiring.served}", "messages": [{message}], "stream": true}}'
        key = " -H 'Authorization: Bearer KEY'" if self.plan.settings.api_keys else ""
        return f"curl -N {self.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
