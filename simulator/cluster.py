"""A disaggregated cluster in virtual time: nodes, instances, conductors, and a trace that passes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from services.conductor.scheduling import Rejection
from shared.workload.trace import BLOCK, TraceRequest
from simulator.attempt import Attempt
from simulator.batch import Batch
from simulator.clock import Clock
from simulator.conductor import Conductor, Reporting
from simulator.decode import DecodeInstance
from simulator.directory import Directory
from simulator.link import Nic
from simulator.node import Node
from simulator.pool import Pool
from simulator.prefill import PrefillInstance
from simulator.request import Request
from simulator.settings import ClusterSettings, Failure

SHORTEST_WAIT = 0.25
CONTENDED = frozenset({"no_room", "no_prefill", "no_decode"})
"""Rejections after which a request asks again, for as long as its patience lasts."""


class Cluster:
    """Build it, :meth:`run` a trace through it once, and read the requests."""

    def __init__(self, settings: ClusterSettings) -> None:
        if settings.prefill % settings.group:
            raise ValueError(f"{settings.prefill} prefill nodes make no groups of {settings.group}")
        self.settings = settings
        self.clock = Clock()
        groups = settings.prefill // settings.group
        names = [f"prefill-{n}" for n in range(settings.prefill)] + [f"decode-{n}" for n in range(settings.decode)]
        self.directory = Directory(self.clock, tuple(names), settings.index_delay)
        self.nodes = {name: self._node(name) for name in names}
        self.prefills = {f"p{n}": self._prefill(n) for n in range(groups)}
        self.decodes = {f"d{n}": self._decode(n) for n in range(settings.decode)}
        self.conductors = [Conductor(settings, self.directory, n) for n in range(settings.conductors)]
        self.requests: list[Request] = []
        self._trace: Iterator[TraceRequest] = iter(())
        self._open = 0
        self._more = False
        self._every: list[tuple[float, Callable[[Cluster], None]]] = []
        for conductor in self.conductors:
            self._introduce(conductor, self.prefills, self.decodes)

    def every(self, seconds: float, look: Callable[[Cluster], None]) -> None:
        """``look`` is called so often while the trace runs."""
        self._every.append((seconds, look))

    def run(self, trace: Iterable[TraceRequest], progress: Callable[[int], None] | None = None) -> list[Request]:
        """Every request of the trace, ended; those that have ended no longer have their ``hash_ids``, and those of the
        trace are read as they arrive: memory is that of what is live. ``progress`` hears how many have arrived."""
        self._trace = iter(trace)
        self._expect()
        for failure in self.settings.failures:
            self.clock.at(failure.at, self._fail, failure)
        self._tick(self.settings.report_every, self._report)
        for seconds, look in self._every:
            self._tick(seconds, partial(look, self))
        if progress:
            self._tick(10.0, lambda: progress(len(self.requests)))
        self.clock.run()
        return self.requests

    def replicas(self, block: int) -> int:
        return self.directory.replicas(block)

    # -- building --------------------------------------------------------------------------------------

    def _node(self, name: str) -> Node:
        hardware = self.settings.hardware
        dram = hardware.dram / BLOCK * (1 if name.startswith("prefill") or self.settings.decode_cache else 0)
        return Node(name, Nic(hardware.nic), Pool(dram, hardware.ssd / BLOCK, self.directory.listener(name)))

    def _prefill(self, number: int) -> PrefillInstance:
        settings, hardware = self.settings, self.settings.hardware
        first = number * settings.group
        nodes = [self.nodes[f"prefill-{n}"] for n in range(first, first + settings.group)]
        size, disk = hardware.bytes_per_token, hardware.ssd_rate
        return PrefillInstance(f"p{number}", self.clock, nodes, hardware.prefill, settings.chunk, size, disk)

    def _decode(self, number: int) -> DecodeInstance:
        settings, hardware = self.settings, self.settings.hardware
        node, batch = self.nodes[f"decode-{number}"], Batch(hardware.decode)
        sizes = hardware.hbm, settings.max_batch, settings.decode_cache
        return DecodeInstance(f"d{number}", self.clock, node, batch, *sizes, settings.handover)

    def _introduce(self, conductor: Conductor, prefills: Iterable[str], decodes: Iterable[str]) -> None:
        hardware, ledger = self.settings.hardware, conductor.ledger
        for id in prefills:
            instance = self.prefills[id]
            ledger.put_prefill(id, instance.head.id, instance.predicted)
            ledger.put_agent(instance.head.id, hardware.nic, prefill=True, disk=hardware.ssd_rate)
        for id in decodes:
            decode = self.decodes[id]
            ledger.put_decode(id, hardware.decode)
            conductor.report(decode, self.clock.now)
            if self.settings.decode_cache:
                ledger.put_agent(decode.node.id, hardware.nic, disk=hardware.ssd_rate)

    # -- what happens ----------------------------------------------------------------------------------

    def _expect(self) -> None:
        """The next one of the trace."""
        one = next(self._trace, None)
        self._more = one is not None
        if one is not None:
            self.clock.first(one.arrival, self._arrive, one)

    def _arrive(self, one: TraceRequest) -> None:
        request = Request(len(self.requests), one)
        self.requests.append(request)
        self._open += 1
        self._expect()
        self._place(self.conductors[request.number % len(self.conductors)], request, ())

    def _place(self, conductor: Conductor, request: Request, closed: tuple[str, ...]) -> None:
        now = self.clock.now
        placed = conductor.place(request, request.trace.input_tokens + request.made, now, closed)
        if isinstance(placed, Rejection):
            self._refused(conductor, request, placed)
            return
        request.predicted = now - request.trace.arrival + placed.decision.ttft
        again = partial(self._again, conductor)
        attempt = Attempt(self, conductor, request, placed, again)
        self.clock.after(self.settings.control_delay, attempt.submit)

    def _refused(self, conductor: Conductor, request: Request, rejection: Rejection) -> None:
        patient = self.clock.now - request.trace.arrival < self.settings.patience or request.attempts
        if rejection.reason in CONTENDED and patient:
            wait = max(SHORTEST_WAIT, min(rejection.retry_after, 1.0))
            self.clock.after(wait, self._place, conductor, request, ())
        else:
            self.ended(request, rejection.reason)

    def _again(self, conductor: Conductor, request: Request) -> None:
        self.clock.after(SHORTEST_WAIT, self._place, conductor, request, ())

    def ended(self, request: Request, why: str) -> None:
        """One request less."""
        request.ended, request.trace = why, request.trace._replace(hash_ids=())
        self._open -= 1

    def _fail(self, failure: Failure) -> None:
        node = self.nodes[failure.node]
        if not node.alive:
            return
        dead: list[PrefillInstance | DecodeInstance] = [one for one in self.prefills.values() if node in one.nodes]
        dead += [one for one in self.decodes.values() if one.node is node]
        node.fail()
        for instance in dead:
            instance.fail()
            self.clock.after(failure.seen, self._seen_dead, instance.id)
        if failure.down < float("inf"):
            self.clock.after(max(failure.down, failure.seen), self._back, node)

    def _seen_dead(self, id: str) -> None:
        for conductor in self.conductors:
            conductor.ledger.set_open(id, False)

    def _back(self, node: Node) -> None:
        node.alive = True
        for instance in self.prefills.values():
            if node in instance.nodes and all(one.alive for one in instance.nodes):
                instance.revive()
                self._seen_alive(instance)
        for decode in self.decodes.values():
            if decode.node is node:
                decode.revive()
                self._seen_alive(decode)

    def _seen_alive(self, instance: Reporting) -> None:
        for conductor in self.conductors:
            conductor.report(instance, self.clock.now)
            conductor.ledger.set_open(instance.id, True)

    # -- once in a while -------------------------------------------------------------------------------

    def _tick(self, seconds: float, call: Callable[[], None]) -> None:
        def tick() -> None:
            if self._more or self._open:
                call()
                self.clock.after(seconds, tick)

        self.clock.at(0.0, tick)

    def _report(self) -> None:
        """What instances and agents say once a second, to every conductor."""
        now = self.clock.now
        instances: list[Reporting] = [*self.prefills.values(), *self.decodes.values()]
        loads = [(one.id, one.load()) for one in instances if one.alive]
        for conductor in self.conductors:
            for id, load in loads:
                conductor.ledger.report(id, load, now)
            self._report_agents(conductor)
            if len(self.conductors) > 1:
                self._report_others(conductor)

    def _report_agents(self, conductor: Conductor) -> None:
        rate = self.settings.hardware.nic
        heads = {instance.head.id for instance in self.prefills.values()}
        for id in conductor.ledger.agents.seats:
            backlog, disk = self.nodes[id].nic.backlog, self.settings.hardware.ssd_rate
            conductor.ledger.put_agent(id, rate, backlog, id in heads, disk)

    def _report_others(self, conductor: Conductor) -> None:
        for id in self.decodes:
            rest = [other.coming.get(id, (0, 0)) for other in self.conductors if other is not conductor]
            conductor.ledger.decodes.others(id, sum(one for one, _ in rest), sum(blocks for _, blocks in rest))
