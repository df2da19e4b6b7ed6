"""A deployment of docker-compose.yml under a name of its own: started, asked, scaled, killed in parts, taken down."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared.model import default_folder

ROOT = Path(__file__).parents[2]
COMPOSE = shlex.split(os.environ.get("COMPOSE", ""))
NODES = ("prefill-store", "prefill", "decode-store", "decode", "conductor")
"""The services that are ours."""

PATIENCE = 240.0
MODEL = "SmolLM2-135M-Instruct"

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def run(*argv: str, env: Mapping[str, str] | None = None, timeout: float = PATIENCE) -> str:
    """stdout; fails with what the command had to say."""
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stderr[-3000:]}"
    return done.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def missing() -> str:
    """Why these tests cannot run here; "" when they can."""
    if not COMPOSE or not shutil.which("docker"):
        return "no Docker with compose: make test-compose"
    if subprocess.run(
        ["docker", "image", "inspect", "mooncake-mesh", "mooncake-engine"], capture_output=True
    ).returncode:
        return "the images are not built: make test-compose"
    return "" if default_folder() else "the default model is not in the cache: mooncake model fetch"


class Deployment:
    """``models``: the folder that is mounted. Images are those that were built before."""

    def __init__(self, models: Path) -> None:
        self.port = free_port()
        self.project = f"mooncake-test-{os.getpid()}"
        chosen = {"PORT": str(self.port), "MOONCAKE_MODELS": str(models), "COMPOSE_PROJECT_NAME": self.project}
        self._env = os.environ | chosen | {"MOONCAKE_LOG_FORMAT": "json", "MOONCAKE_LOG_LEVEL": "debug"}
        self._env.pop("COMPOSE_PROFILES", None)

    def compose(self, *words: str, timeout: float = PATIENCE) -> str:
        return run(*COMPOSE, *words, env=self._env, timeout=timeout)

    def up(self, **scale: int) -> None:
        """Healthy, and all instances of ``scale`` have joined: prefill=2, decode=2."""
        words = [word for role, n in scale.items() for word in ("--scale", f"{role}={n}")]
        try:
            self.compose("up", "--detach", "--no-build", "--wait", "--no-recreate", *words)
        except AssertionError as error:
            logs = subprocess.run([*COMPOSE, "logs", "--tail", "30"], cwd=ROOT, env=self._env, capture_output=True)
            raise AssertionError(f"{error}\n{logs.stdout.decode()[-6000:]}") from None
        for role, n in scale.items():
            wait_for(lambda role=role, n=n: self.instances().count(role) == n, f"{n} {role}")  # type: ignore[misc]

    def get(self, path: str, body: object = None, **headers: str) -> Any:
        """What the API answers, as JSON. Raises HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"} | headers
        )
        with _direct.open(request, timeout=120) as response:
            return json.load(response)

    def complete(self, prompt: str, tokens: int = 8) -> Any:
        return self.get(
            "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 1}
        )

    def instances(self) -> list[str]:
        """Roles of those that are alive."""
        return [one["role"] for one in self.get("/cluster")["instances"] if one["state"] == "alive"]

    def container(self, service: str) -> str:
        """The id of its first container."""
        return self.compose("ps", "--all", "--quiet", service).split()[0]

    def kill(self, service: str) -> None:
        """As a crash: `docker kill` would count as a wish to have it stopped, and nothing would bring it back."""
        os.kill(int(inspect(self.container(service), "{{.State.Pid}}")), signal.SIGKILL)

    def lines(self, service: str) -> list[str]:
        """All that its containers have logged."""
        return self.compose("logs", "--no-log-prefix", service).splitlines()

    def metric(self, service: str, name: str, **labels: str) -> float:
        """The sum over all series of that name with these labels, scraped inside of the container."""
        script = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9400/metrics').read().decode())"
        lines = self.compose("exec", "-T", service, "python", "-c", script).splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition("{")[0] == name and all(one in line for one in wanted)
        )

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")

    def left(self) -> list[str]:
        """Containers, volumes and networks of this project that are still there."""
        label = f"label=com.docker.compose.project={self.project}"
        return [
            line
            for kind in (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
            for line in run("docker", *kind, "--quiet", "--filter", label).split()
        ]


def inspect(container: str, template: str) -> str:
    return run("docker", "inspect", "--format", template, container).strip()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Asks until it holds; errors of HTTP count as "not yet"."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            if condition():
                return
        except (urllib.error.URLError, OSError):
            pass
        assert time.monotonic() < until, f"not seen within {PATIENCE:g} s: {what}"
        time.sleep(0.5)
