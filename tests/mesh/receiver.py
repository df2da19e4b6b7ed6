"""An independent OTLP receiver (rotel) as a process, and the spans that it prints."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

PATIENCE = 100.0
_VALUE = re.compile(r"^\s*-> ([^:]+): \w+\((.*)\)$")


@dataclass
class Span:
    """Ids in hexadecimal, ``parent`` "" for a root."""

    service: str
    trace: str = ""
    parent: str = ""
    id: str = ""
    name: str = ""
    kind: str = ""
    status: str = ""
    reason: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    links: int = 0


FIELDS = {
    "Trace ID": "trace",
    "Parent ID": "parent",
    "ID": "id",
    "Name": "name",
    "Kind": "kind",
    "Status code": "status",
    "Status message": "reason",
}


def parse(text: str) -> list[Span]:
    """What the receiver's detailed log tells of spans."""
    spans: list[Span] = []
    service, part = "", ""
    for line in text.splitlines():
        name, _, value = (word.strip() for word in line.partition(":"))
        if line.startswith("ResourceSpans"):
            part = "resource"
        elif re.match(r"Span #\d+", line):
            spans.append(Span(service))
            part = "span"
        elif re.match(r"(Span)?Event", line) or name == "Events":
            part = "events"
        elif re.match(r"(Span)?Link", line) or name == "Links":
            part = "links"
        elif name == "Attributes" and part != "events":
            part = "attributes"
        elif part == "resource" and (found := _VALUE.match(line)) and found[1] == "service.name":
            service = found[2]
        elif part == "span" and name in FIELDS:
            setattr(spans[-1], FIELDS[name], value)
        elif part == "attributes" and (found := _VALUE.match(line)):
            spans[-1].attributes[found[1]] = found[2]
        elif part == "events" and name == "-> Name":
            spans[-1].events.append(value)
        elif part == "links" and name.endswith("Trace ID"):
            spans[-1].links += 1
    return spans


class Receiver:
    """``with Receiver(folder) as it``: listens on ``it.http`` and ``it.grpc``."""

    def __init__(self, folder: Path) -> None:
        ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        http, grpc = (one.getsockname()[1] for one in ports)
        for one in ports:
            one.close()
        self.http, self.grpc = f"http://127.0.0.1:{http}", f"http://127.0.0.1:{grpc}"
        self._log = folder / "rotel"
        found = importlib.util.find_spec("rotel")
        assert found is not None and found.origin is not None
        self._argv = [str(Path(found.origin).parent / "rotel-agent"), "start", "--exporter", "blackhole"]
        self._argv += ["--debug-log", "traces", "--debug-log-verbosity", "detailed"]
        self._argv += ["--otlp-http-endpoint", f"127.0.0.1:{http}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"]
        self._argv += ["--pid-file", str(folder / "rotel.pid"), "--log-file", str(folder / "rotel.log")]

    def __enter__(self) -> Self:
        with self._log.open("wb") as out:
            self._child = subprocess.Popen(self._argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._child.kill()
        self._child.wait()

    def spans(self, trace: str = "") -> list[Span]:
        """All that came, or those of one trace."""
        return [span for span in parse(self._log.read_text(errors="replace")) if trace in ("", span.trace)]

    def wait(self, condition: Callable[[list[Span]], object], trace: str = "") -> list[Span]:
        """The spans, once they are as wanted."""
        until = time.monotonic() + PATIENCE
        while not condition(spans := self.spans(trace)):
            assert time.monotonic() < until, sorted((span.service, span.name, span.status) for span in spans)
            time.sleep(0.1)
        return spans
