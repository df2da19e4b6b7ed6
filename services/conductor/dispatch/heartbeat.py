"""Once a second: every instance gets its live list; its answer is the proof that it lives."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from services.conductor.dispatch import metrics
from services.conductor.dispatch.mesh import Mesh
from services.conductor.dispatch.roster import Change, Member, State
from shared.errors import MooncakeError, NoResponders
from shared.messages import LiveList, LiveReply, Ref
from shared.records import DECODE, PREFILL
from shared.telemetry import log

PERIOD = 1.0
ANSWER_WITHIN = 2.0

logger = log("dispatch")


class Heartbeat:
    """``apply``: carries changes of the roster on. ``not_held``: told of attempts that an instance does not know."""

    def __init__(
        self,
        mesh: Mesh,
        apply: Callable[[list[Change]], None],
        not_held: Callable[[Ref, str, int], None],
    ) -> None:
        self._mesh = mesh
        self._apply = apply
        self._not_held = not_held

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                self._beat(loop.time())
                self._show()
            except Exception:
                logger.exception("a round of live lists failed")
            due = max(due + PERIOD, loop.time())
            await asyncio.sleep(due - loop.time())
            self._mesh.roster.excuse(max(loop.time() - due, 0.0), loop.time())

    def _show(self) -> None:
        mesh, index = self._mesh, self._mesh.placer.matcher.summary()
        metrics.INDEX_LAG.set(index.get("lag_s") or 0.0)
        metrics.INDEX_SYNCED.set(bool(index.get("synced")))
        metrics.RUNNING.set(len(mesh.runs))
        mesh.gatekeeper.show()
        metrics.TAIL.set(mesh.ledger.decodes.tail.seconds(asyncio.get_running_loop().time()))
        counted = Counter((member.record.role, member.state.value) for member in mesh.roster.members.values())
        for role in (PREFILL, DECODE):
            for state in State:
                metrics.INSTANCES.labels(role, state.value).set(counted[role, state.value])

    def _beat(self, now: float) -> None:
        self._apply(self._mesh.roster.tick(now))
        if not self._mesh.bus.connected:
            return
        mesh, number = self._mesh, self._mesh.lists.begin_round()
        for member in mesh.roster.members.values():
            if member.state is not State.REFUSED:
                ref = member.record.ref
                attempts, acked = mesh.lists.page(ref)
                mesh.spawn(
                    self._tell(ref, LiveList(sender=mesh.me, target=ref, number=number, attempts=attempts, acked=acked))
                )

    async def _tell(self, ref: Ref, message: LiveList) -> None:
        mesh = self._mesh
        try:
            reply = await mesh.bus.request(ref.id, message, ANSWER_WITHIN)
        except NoResponders:
            self._apply(mesh.roster.no_responders(ref, asyncio.get_running_loop().time()))
            return
        except MooncakeError:
            return
        if isinstance(reply, LiveReply):
            self._replied(ref, reply)

    def _replied(self, ref: Ref, reply: LiveReply) -> None:
        member = self._mesh.roster.get(ref)
        if reply.sender == ref and member:
            self._answered(member, reply)
        elif reply.sender != ref:  # another incarnation answers for that id: this one is dead (rule: incarnation)
            self._apply(self._mesh.roster.replaced(ref))

    def _answered(self, member: Member, reply: LiveReply) -> None:
        mesh, ref, now = self._mesh, member.record.ref, asyncio.get_running_loop().time()
        was_open = member.open
        self._apply(mesh.roster.heard(ref, reply.load, now))
        if was_open != member.open:
            mesh.ledger.set_open(ref.id, member.open)
        mesh.reported(ref.id, reply.load, now)
        for request, _ in mesh.lists.answered(ref, reply.number):
            if run := mesh.runs.get(request):
                run.settle(ref)
        for request, attempt in reply.unknown:
            self._not_held(ref, request, attempt)
