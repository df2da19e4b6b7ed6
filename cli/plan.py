"""What ``mooncake up`` starts: settings in, command lines out. Pure, but for the paths of the binaries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cli.child import Spec
from cli.config_docs import settings_type
from cli.leftovers import MARK
from cli.sections import NO_SECTIONS, Sections
from cli.settings import UpSettings
from shared.embedded import NatsServer, RedisServer
from shared.setting import PREFIX, settings_of

SERVERS, STORES, ENGINES, CONDUCTOR = range(4)
"""Stages: started in this order, stopped in the reverse one."""

GRACE = {SERVERS: 1.0, STORES: 2.0, ENGINES: 2.5, CONDUCTOR: 4.0}
"""Seconds from SIGTERM to SIGKILL; all together under ten."""

FLUSH = 1.0
"""Seconds of a store's grace for what only its DRAM holds."""

DRAIN = 2.0
TRANSPORTS = {"auto": "prefer:shm,tcp", "shm": "require:shm", "tcp": "require:tcp", "rdma": "require:rdma"}
KEPT = ("MOONCAKE_CACHE",)
Environment = Mapping[str, str]
Flags = dict[str, object]


@dataclass(frozen=True)
class Wiring:
    """What ``up`` has found or made up before anything starts. ``mark`` names this run; ``nats`` and ``redis`` are
    URLs; ``folder`` holds the model, served as ``served``; ``config`` is the file of settings, "" for none, and
    ``sections`` what it says to services. ``colour``: children may colour their lines. ``tls``: files of the stores'
    certificate, key and authorities, by setting; empty without TLS between them."""

    mark: str
    secret: str
    nats: str
    redis: str
    folder: str
    served: str
    port: int
    config: str = ""
    sections: Sections = NO_SECTIONS
    colour: bool = False
    tls: Mapping[str, str] = field(default_factory=dict)


class Plan:
    """All processes of one mesh on this machine."""

    def __init__(self, settings: UpSettings, wiring: Wiring, env: Environment) -> None:
        self.settings = settings
        self.wiring = wiring
        self._env = env
        self._metrics = settings.metrics_port

    def servers(self) -> list[Spec]:
        """The embedded ones: those whose URL the user did not give."""
        specs = []
        if not self.settings.nats:
            argv = NatsServer(_port(self.wiring.nats)).command("/")
            specs.append(Spec("nats", argv, SERVERS, self._base(), GRACE[SERVERS]))
        if not self.settings.redis:
            # with a process title of its own it would overwrite the environment that carries our mark
            argv = [*RedisServer(_port(self.wiring.redis)).command("/"), "--set-proc-title", "no"]
            specs.append(Spec("redis", argv, SERVERS, self._base(), GRACE[SERVERS]))
        return specs

    def nodes(self) -> list[tuple[str, str]]:
        """(role, node) of every instance: ``("prefill", "node-p0")``."""
        counts = (("prefill", self.settings.prefill), ("decode", self.settings.decode))
        return [(role, f"node-{role[0]}{i}") for role, count in counts for i in range(count)]

    def instances(self) -> list[tuple[str, str, str]]:
        """(role, node, id) of every instance: ``("prefill", "node-p0", "prefill-0")``."""
        return [(role, node, f"{role}-{node[6:]}") for role, node in self.nodes()]

    def summary(self) -> str:
        """``SmolLM2-135M-Instruct: 1 prefill, 1 decode``."""
        several = f", {self.settings.conductors} conductors" if self.settings.conductors > 1 else ""
        return f"{self.wiring.served}: {self.settings.prefill} prefill, {self.settings.decode} decode{several}"

    def stores(self) -> Iterator[Spec]:
        """A store agent on each node."""
        for _, node in self.nodes():
            flags: Flags = {
                "id": node,
                "node": node,
                "socket": self.socket(node),
                "pool_bytes": self.settings.pool_bytes,
            }
            if self.settings.ssd_path:
                path = os.path.join(os.path.abspath(self.settings.ssd_path), node)
                flags |= {"ssd_path": path, "ssd_bytes": self.settings.ssd_bytes, "ssd_flush": FLUSH}
            flags |= {"transports": TRANSPORTS[self.settings.transport], **self.wiring.tls}
            flags |= {} if self.settings.verify == "auto" else {"verify": self.settings.verify}
            yield self._service("store", f"store-{node[5:]}", flags, STORES, self._secret)

    def engines(self) -> Iterator[Spec]:
        for role, node, name in self.instances():
            flags: Flags = {"id": name, "node": node, "agent": self.socket(node), "engine": self.settings.engine}
            flags |= {"model": self.wiring.folder, "served_name": self.wiring.served, "dtype": self.settings.dtype}
            flags |= {"block_size": self.settings.block_size, "threads": self.settings.threads}
            flags |= {"context_length": self.settings.context_length} if self.settings.context_length else {}
            model = self.settings.latency_model
            flags |= {"latency_model": os.path.abspath(model)} if model else {}
            yield self._service(role, name, flags, ENGINES, self._secret)

    def conductors(self) -> list[Spec]:
        return [self.conductor(number) for number in range(self.settings.conductors)]

    def conductor(self, number: int = 0) -> Spec:
        own = self.settings
        name = f"conductor-{number}" if own.conductors > 1 else "conductor"
        flags: Flags = {"id": f"conductor-{number}", "node": name, "host": own.host, "port": self.wiring.port}
        flags |= {"reuse_port": True} if own.conductors > 1 else {}
        flags |= {"model": self.wiring.folder, "served_model_name": self.wiring.served, "drain_timeout_s": DRAIN}
        chosen: Flags = {"api_keys": own.api_keys, "policy": own.policy}
        chosen |= {"slo_ttft_ms": own.slo_ttft_ms, "slo_tbt_ms": own.slo_tbt_ms}
        flags |= {name: value for name, value in chosen.items() if value}
        return self._service("conductor", name, flags, CONDUCTOR)

    def socket(self, node: str) -> str:
        """Abstract: nothing to clean up, and no other mesh on this machine has the same."""
        return f"@mooncake-{self.wiring.mark}-{node}"

    @property
    def _secret(self) -> dict[str, str]:
        """For those that touch KV. In the environment: everybody can read command lines."""
        return {"MOONCAKE_SECRET": self.wiring.secret}

    @property
    def _urls(self) -> dict[str, str]:
        """In the environment too: they may hold passwords."""
        return {"MOONCAKE_NATS": self.wiring.nats, "MOONCAKE_REDIS": self.wiring.redis}

    def _service(self, kind: str, name: str, flags: Flags, stage: int, env: Environment | None = None) -> Spec:
        common: Flags = {"mesh": self.settings.mesh}
        common |= {"log_level": self.settings.log_level, "log_format": self.log_format}
        common |= {"metrics_host": self.settings.metrics_host, "metrics_port": self._next_metrics_port()}
        argv = [sys.executable, "-P", "-m", f"services.{kind}"]  # -P: never a package of the working folder
        for flag, value in (common | flags).items():
            if not self.wiring.sections.decide(kind, flag):
                argv += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
        variables = {**self._base(), **self._own_variables(kind), **self._urls, **(env or {})}
        return Spec(name, argv, stage, variables, GRACE[stage])

    @property
    def log_format(self) -> str:
        """Children write into a pipe; people read it."""
        return "console" if self.settings.log_format == "auto" else self.settings.log_format

    def _next_metrics_port(self) -> int:
        """-1 and 0 are the same for all; from a given first port on, each process takes the next."""
        port = self._metrics
        self._metrics += port > 0
        return port

    def _base(self) -> dict[str, str]:
        """The caller's environment without ``MOONCAKE_*``: the port of the API is not the port of a store agent."""
        env = {name: value for name, value in self._env.items() if not name.startswith(PREFIX) or name in KEPT}
        env |= {MARK: self.wiring.mark, "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
        env |= {"OMP_NUM_THREADS": str(self.settings.threads), "PYTHONUNBUFFERED": "1"}
        return env | ({"FORCE_COLOR": "1"} if self.wiring.colour else {})

    def _own_variables(self, kind: str) -> dict[str, str]:
        """Variables that are settings of this service and not of ``up``, and the file of settings."""
        config = {"MOONCAKE_CONFIG": os.path.abspath(self.wiring.config)} if self.wiring.config else {}
        return config | {name: self._env[name] for name in variables(kind) if name in self._env}


def variables(kind: str) -> set[str]:
    """Variables that ``up`` hands on to this service: its settings, but for those that ``up`` has by the same name."""
    taken = {setting.variable for setting in settings_of(UpSettings)}
    return {setting.variable for setting in settings_of(settings_type(kind))} - taken


def _port(url: str) -> int:
    return int(url.partition("://")[2].partition("/")[0].rpartition(":")[2])
