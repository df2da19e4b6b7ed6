"""When a mesh counts as ready, and what is said then."""

from __future__ import annotations

import shlex

import click
from rich.text import Text

from cli.api import DEFAULT_URL, Api, ApiError
from cli.console import out, print_json, redis_option, typed
from cli.plan import Plan
from shared.addresses import shown

QUESTION = "What is the capital of France?"
LONGEST = 40
"""Tokens of the first answer that somebody sees, the likeliest ones: a small model that draws them says anything."""
ANSWERLESS = "the conductor does not answer yet"
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
        self.reason = ANSWERLESS
        self._api = Api(self.url, timeout=5)

    def look(self) -> bool:
        """True once it is; else ``reason`` says why not."""
        try:
            status, body = self._api.get_any("/ready")
            missing = self._missing()
        except ApiError as error:
            self.reason = error.message if error.status else ANSWERLESS
            return False
        self.reason = f"not there yet: {', '.join(missing)}" if missing else str(body.get("error") or "")
        return status == 200 and not missing

    def _missing(self) -> list[str]:
        """Instances that have not registered yet. Where API keys hide the cluster, ``/ready`` has to do."""
        if self.plan.settings.api_keys:
            return []
        cluster = self._api.get("/cluster")
        here = {one.get("id") for one in (*(cluster.get("instances") or []), *(cluster.get("conductors") or []))}
        number = self.plan.settings.conductors
        conductors = [f"conductor-{i}" for i in range(number)] if number > 1 else []
        return [id for id in (*(id for _, _, id in self.plan.instances()), *conductors) if id not in here]

    def say(self, seconds: float, as_json: bool) -> None:
        """On stdout: one JSON document, or a few lines with a command to copy."""
        settings = self.plan.settings
        if as_json:
            counts = {"prefill": settings.prefill, "decode": settings.decode}
            servers = {"nats": shown(self.plan.wiring.nats), "redis": shown(self.plan.wiring.redis)}
            run = {
                "url": self.url,
                "model": self.plan.wiring.served,
                "mesh_id": self.plan.wiring.mark,
                "ready_s": round(seconds, 3),
            }
            print_json({"ready": True, **run, **counts, **servers, **self.plan.wiring.tls})
            return
        out.print()
        out.print(Text(f"Ready after {seconds:.1f} s at {self.url}", style="bold green"), soft_wrap=True)
        out.print(Text(f"{self.plan.summary()}. Try:\n"), soft_wrap=True)
        click.echo(self.curl() + "\n")
        click.echo("\n".join(self.commands()) + "\n\nCtrl-C stops all of it.\n")

    def commands(self) -> list[str]:
        """To paste into a second terminal."""
        url = "" if self.url == DEFAULT_URL else f" --url {self.url}"
        mesh = "" if self.plan.settings.mesh == "default" else f" --mesh {self.plan.settings.mesh}"
        redis = redis_option(self.plan.wiring.redis)
        return [f"{typed()} chat{url}", f"{typed()} status{url}", f"{typed()} store ls {redis}{mesh}"]

    def curl(self) -> str:
        """A streamed chat completion, to paste into a shell."""
        message = f'{{"role": "user", "content": "{QUESTION}"}}'
        body = f'{{"model": "{self.plan.wiring.served}", "messages": [{message}], "stream": true, '
        body += f'"temperature": 0, "max_tokens": {LONGEST}}}'
        key = " -H 'Authorization: Bearer KEY'" if self.plan.settings.api_keys else ""
        return f"curl -N {self.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
