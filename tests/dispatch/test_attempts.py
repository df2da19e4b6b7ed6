"""The attempt core and the live lists against instances of the checked control-plane model: any order, loss, repeats,
crashes. Invariants: a left attempt never comes back, nothing is retried without a fault, nothing is held in the end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.conductor.dispatch.attempts import MOST_PLANNED, Attempts, Left, Side
from services.conductor.dispatch.lists import LiveLists
from shared.errors import AgentGone, DeadlineExceeded, Draining, InvalidInput, MooncakeError, NoRoom, Tombstoned
from shared.messages import Ref
from tests.examples import examples

HOLDING = ("queued", "landing", "hold", "admitted", "landed", "run")
Message = tuple[str, int, int]
"""(kind, attempt, incarnation it is aimed at)"""


class Control(RuleBasedStateMachine):
    """Prefill and decode are the same two instances for every attempt: the hardest case for tombstones."""

    MOST = 6

    @initialize()
    def begin(self) -> None:
        self.attempts = Attempts(most=self.MOST)
        self.lists = LiveLists()
        self.incarnation = {Side.PREFILL: 1, Side.DECODE: 1}
        self.state: dict[tuple[Side, int], str] = {}
        self.had: set[tuple[Side, int]] = set()
        self.aimed: dict[int, dict[Side, Ref]] = {}
        self.left: set[int] = set()
        self.bus: list[Message] = []
        self.clean = True
        self.place()

    # -- the gateway's shell, reduced to its moves ------------------------------------------------------

    def ref(self, side: Side) -> Ref:
        return Ref(side.value, self.incarnation[side])

    def place(self) -> None:
        if self.attempts.exhausted:
            self.attempts.finish()
            return
        attempt = self.attempts.begin(self.ref(Side.PREFILL), self.ref(Side.DECODE))
        self.aimed[attempt.number] = {side: part.ref for side, part in attempt.parts.items()}
        for part in attempt.parts.values():
            self.lists.add(part.ref, ("r", attempt.number))
        self.ask(attempt.number, Side.PREFILL)
        self.ask(attempt.number, Side.DECODE)

    def ask(self, attempt: int, side: Side) -> None:
        kind = "submit" if side is Side.PREFILL else "admit"
        self.post(kind, attempt, self.aimed[attempt][side].incarnation)

    def leave(self, left: Left | None) -> None:
        if left is None:
            return
        assert left.attempt.number not in self.left
        assert not self.clean, f"retried without any fault: {left.reason}"
        self.left.add(left.attempt.number)
        for side, part in left.attempt.parts.items():
            self.lists.remove(part.ref, ("r", left.attempt.number), complete=False)
            self.post("cancel_p" if side is Side.PREFILL else "cancel_d", left.attempt.number, part.ref.incarnation)
        self.place()

    def post(self, kind: str, attempt: int, incarnation: int) -> None:
        if (kind, attempt, incarnation) not in self.bus:
            self.bus.append((kind, attempt, incarnation))

    # -- messages ----------------------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        kind, attempt, incarnation = message
        if kind in ("took_p", "took_d", "refused_p", "refused_d", "first", "second", "end"):
            self.to_gateway(kind, attempt)
            return
        side = Side.PREFILL if kind in ("submit", "grant", "ready", "cancel_p") else Side.DECODE
        if incarnation != self.incarnation[side]:
            return
        getattr(self, "on_" + kind)(attempt, self.state.get((side, attempt), "-"))

    def to_gateway(self, kind: str, attempt: int) -> None:
        live = self.attempts.current(attempt)
        side = Side.PREFILL if kind in ("took_p", "refused_p", "first") else Side.DECODE
        ref = self.aimed[attempt][side]
        if kind.startswith("took"):
            if self.attempts.accepted(attempt, side):
                self.lists.accept(ref, ("r", attempt))
        elif kind.startswith("refused"):
            self.leave(self.attempts.refused(attempt, side, NoRoom("scripted")))
        elif live:
            assert self.attempts.token_from(attempt, ref) is side
            self.lists.accept(ref, ("r", attempt))
            if side is Side.DECODE:
                self.lists.remove(self.aimed[attempt][Side.PREFILL], ("r", attempt), complete=True)
            if kind == "end":
                self.lists.remove(ref, ("r", attempt), complete=True)
                assert self.attempts.finish()

    def hold(self, side: Side, attempt: int, state: str) -> None:
        assert (side, attempt) not in self.had, "a dropped attempt came back"
        self.state[side, attempt] = state

    def drop(self, side: Side, attempt: int, state: str = "dropped") -> None:
        self.state[side, attempt] = state
        self.had.add((side, attempt))

    def on_submit(self, attempt: int, state: str) -> None:
        if state == "-":
            self.hold(Side.PREFILL, attempt, "queued")
        self.post("refused_p" if state == "dropped" else "took_p", attempt, 0)

    def on_admit(self, attempt: int, state: str) -> None:
        if state == "-":
            self.hold(Side.DECODE, attempt, "admitted")
        self.post("refused_d" if state == "dropped" else "took_d", attempt, 0)

    def on_askland(self, attempt: int, state: str) -> None:
        if state == "-":
            self.hold(Side.DECODE, attempt, "landed")
        elif state == "admitted":
            self.state[Side.DECODE, attempt] = "landed"
        kind = "grant" if self.state[Side.DECODE, attempt] in ("landed", "run", "done") else "refused_d"
        self.post(kind, attempt, self.aimed[attempt][Side.PREFILL].incarnation if kind == "grant" else 0)

    def on_grant(self, attempt: int, state: str) -> None:
        if state == "landing":
            self.state[Side.PREFILL, attempt] = "hold"
            self.post("first", attempt, 0)
            self.post("start", attempt, self.aimed[attempt][Side.DECODE].incarnation)

    def on_start(self, attempt: int, state: str) -> None:
        if state == "landed":
            self.state[Side.DECODE, attempt] = "run"
        if state != "-":
            self.post("ready", attempt, self.aimed[attempt][Side.PREFILL].incarnation)

    def on_ready(self, attempt: int, state: str) -> None:
        if state == "hold":
            self.drop(Side.PREFILL, attempt, "done")

    def on_cancel_p(self, attempt: int, state: str) -> None:
        if state != "done":
            self.drop(Side.PREFILL, attempt)

    def on_cancel_d(self, attempt: int, state: str) -> None:
        if state != "done":
            self.drop(Side.DECODE, attempt)

    # -- what happens by itself --------------------------------------------------------------------------

    def flying(self, *kinds: str) -> bool:
        return any(kind in kinds for kind, _, _ in self.bus)

    def engines(self) -> None:
        for (side, attempt), state in list(self.state.items()):
            aimed = self.aimed[attempt][Side.DECODE].incarnation
            alive = aimed == self.incarnation[Side.DECODE]
            if state == "queued":
                self.state[side, attempt] = "landing"
            if self.state[side, attempt] == "landing" and alive:
                self.post("askland", attempt, aimed)
            elif state == "hold" and alive:
                self.post("start", attempt, aimed)
            elif state == "run":
                self.drop(side, attempt, "done")
                self.post("end", attempt, 0)

    def list_once(self, side: Side) -> None:
        """One list to one instance, answered, in the place of three that say the same."""
        self.lists.begin_round()
        entries, _ = self.lists.page(self.ref(side))
        listed = {attempt for _, attempt, _ in entries}
        for (who, attempt), state in list(self.state.items()):
            if who is side and state in HOLDING and attempt not in listed:
                self.drop(side, attempt)
        unknown = [a for _, a, accepted in entries if accepted and self.state.get((side, a), "-") in ("-", "dropped")]
        for attempt in unknown:
            self.leave(self.attempts.unknown(attempt, self.ref(side)))

    def gateway(self) -> None:
        live = self.attempts.live
        if live is None:
            return
        for side, part in live.parts.items():
            if part.ref != self.ref(side):
                self.leave(self.attempts.died(part.ref))
                return
            asked = ("submit", "took_p", "refused_p") if side is Side.PREFILL else ("admit", "took_d", "refused_d")
            if not part.accepted and not self.flying(*asked):
                self.ask(live.number, side)
        if self.state.get((Side.DECODE, live.number)) == "done" and not self.flying("end"):
            self.post("end", live.number, 0)  # tokens.since

    # -- rules -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.bus)
    @rule(at=st.integers(0, 20))
    def message(self, at: int) -> None:
        self.deliver(self.bus.pop(at % len(self.bus)))

    @precondition(lambda self: self.bus)
    @rule(at=st.integers(0, 20), twice=st.booleans())
    def fault(self, at: int, twice: bool) -> None:
        self.clean = False
        message = self.bus[at % len(self.bus)]
        if twice:
            self.deliver(message)
        else:
            self.bus.remove(message)

    @rule()
    def engines_step(self) -> None:
        self.engines()

    @rule(side=st.sampled_from(Side))
    def list_comes(self, side: Side) -> None:
        self.list_once(side)

    @rule()
    def gateway_looks(self) -> None:
        self.gateway()

    @rule(side=st.sampled_from(Side))
    def crash(self, side: Side) -> None:
        self.clean = False
        self.incarnation[side] += 1
        for who, attempt in [key for key in self.state if key[0] is side]:
            self.had.add((who, attempt))
            del self.state[who, attempt]

    @rule(code=st.sampled_from([Draining, AgentGone, NoRoom]), side=st.sampled_from(Side))
    def instance_gives_up(self, code: type[MooncakeError], side: Side) -> None:
        live = self.attempts.live
        if live and self.state.get((side, live.number)) in HOLDING and live.parts[side].ref == self.ref(side):
            self.clean = False
            self.drop(side, live.number)
            self.leave(self.attempts.gone(live.number, self.ref(side), code("scripted")))

    @rule()
    def client_leaves(self) -> None:
        attempt = self.attempts.finish()
        if attempt:
            for side, part in attempt.parts.items():
                self.lists.remove(part.ref, ("r", attempt.number), complete=False)
                self.post("cancel_p" if side is Side.PREFILL else "cancel_d", attempt.number, part.ref.incarnation)

    @invariant()
    def only_the_live_attempt_is_listed(self) -> None:
        live = {self.attempts.live.number} if self.attempts.live else set()
        for side in Side:
            for incarnation in range(1, self.incarnation[side] + 1):
                entries, _ = self.lists.page(Ref(side.value, incarnation))
                assert {attempt for _, attempt, _ in entries} <= live
        assert not live & self.left

    def teardown(self) -> None:
        if not hasattr(self, "attempts"):
            return
        for _ in range(300):
            while self.bus:
                self.deliver(self.bus.pop(0))
            self.engines()
            self.gateway()
            self.list_once(Side.PREFILL)
            self.list_once(Side.DECODE)
            if self.attempts.over and not self.bus and not self.held():
                break
        assert self.attempts.over and not self.held() and not len(self.lists)

    def held(self) -> list[tuple[Side, int]]:
        return [key for key, state in self.state.items() if state in HOLDING]


TestControl = Control.TestCase
TestControl.settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)


def started(most: int = 3) -> tuple[Attempts, Ref, Ref]:
    attempts, p, d = Attempts(most), Ref("p", 1), Ref("d", 1)
    attempts.begin(p, d)
    return attempts, p, d


def test_a_refusal_avoids_only_who_refused() -> None:
    attempts, p, d = started()
    left = attempts.refused(1, Side.DECODE, AgentGone("gone"))
    assert left and left.counts and attempts.avoid == {d} and attempts.live is None
    assert attempts.refused(1, Side.PREFILL, NoRoom("late")) is None
    assert attempts.begin(p, Ref("d2", 1)).number == 2


def test_prefill_speaks_for_decode() -> None:
    attempts, p, d = started()
    assert attempts.gone(1, p, NoRoom("landing", field="decode"))
    assert attempts.avoid == {d}


def test_decode_speaks_for_prefill() -> None:
    attempts, p, d = started()
    assert attempts.gone(1, d, DeadlineExceeded("nothing lands", field="prefill"))
    assert attempts.avoid == {p}
    attempts, p, d = started()
    assert attempts.gone(1, d, DeadlineExceeded("some other field", field="tokens"))
    assert attempts.avoid == {d}


def test_prefill_may_die_after_the_first_token_of_decode() -> None:
    attempts, p, d = started()
    assert attempts.token_from(1, p) is Side.PREFILL
    assert attempts.token_from(1, d) is Side.DECODE
    assert attempts.died(p) is None and attempts.unknown(1, p) is None and attempts.gone(1, p, Draining("x")) is None
    assert attempts.died(Ref("d", 2)) is None  # another incarnation is somebody else
    assert attempts.died(d)


def test_unknown_counts_only_where_it_was_accepted() -> None:
    attempts, _, d = started()
    assert attempts.unknown(1, d) is None
    assert attempts.accepted(1, Side.DECODE) and not attempts.accepted(1, Side.DECODE)
    assert attempts.unknown(1, Ref("x", 1)) is None
    assert attempts.unknown(1, d)


def test_bounds() -> None:
    attempts, p, d = started(most=2)
    assert not attempts.refused(1, Side.PREFILL, Draining("x")).counts  # type: ignore[union-attr]
    attempts.begin(p, d)
    attempts.stalled(2)
    assert attempts.failures == 1
    attempts.forgive()
    attempts.begin(p, d)
    assert attempts.refused(3, Side.PREFILL, Tombstoned("x")) and attempts.exhausted
    planned, _, _ = started(most=1)
    for number in range(1, MOST_PLANNED + 1):
        assert not planned.exhausted or number == MOST_PLANNED
        planned.gone(number, p, Draining("x"))
        if number < MOST_PLANNED:
            planned.begin(p, d)
    assert planned.exhausted


def test_what_is_wrong_with_the_input_is_fatal() -> None:
    attempts, _, _ = started()
    left = attempts.refused(1, Side.PREFILL, InvalidInput("no"))
    assert left and left.fatal
