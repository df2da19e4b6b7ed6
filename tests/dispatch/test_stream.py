"""The token stream core, driven after the checked model: lost, repeated, late and reordered entries, and migration."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.conductor.dispatch.stream import ASK_AGAIN, GAP_GRACE, TokenStream
from shared.messages import Output, Usage
from tests.examples import examples

LENGTH = 5
SILENCE = 2.0


def drawn(attempt: int, index: int) -> Output:
    """Each attempt draws differently, so that mixing two is visible."""
    return Output(index, 100 * attempt + index, "stop" if index == LENGTH - 1 else "")


class Stream(RuleBasedStateMachine):
    """``outputs``: attempt -> what its instance has drawn, beginning with what it was resumed with. ``bus``: entries in
    flight, taken in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.stream = TokenStream(SILENCE, 0.0)
        self.attempt = 0
        self.outputs: dict[int, list[Output]] = {}
        self.bus: list[tuple[int, Output]] = []
        self.client: list[int] = []
        self.want: list[int] = []
        self.migrate()

    def migrate(self) -> None:
        """A resume starts from what was delivered, and the expected text continues from there."""
        self.attempt += 1
        base = self.stream.resume(self.attempt, self.now).tolist()
        assert base == self.client
        self.outputs[self.attempt] = [Output(i, token) for i, token in enumerate(base)]
        rest = [drawn(self.attempt, i).token for i in range(len(base), LENGTH)]
        self.want = base + rest

    def receive(self, attempt: int, output: Output) -> None:
        for token in self.stream.receive(attempt, output, Usage() if output.index == 0 else None, self.now):
            assert (token.usage is not None) == (token.output.index == 0)
            self.client.append(token.output.token)

    @rule(attempt=st.integers(1, 4))
    def draws(self, attempt: int) -> None:
        """Instances of attempts that were left draw on, too, for a while."""
        outputs = self.outputs.get(attempt)
        if outputs is not None and len(outputs) < LENGTH:
            output = drawn(attempt, len(outputs))
            outputs.append(output)
            self.bus.append((attempt, output))

    @precondition(lambda self: self.bus)
    @rule(at=st.integers(0, 30), keep=st.booleans(), lose=st.booleans())
    def arrives(self, at: int, keep: bool, lose: bool) -> None:
        entry = self.bus[at % len(self.bus)]
        if not keep:
            self.bus.remove(entry)
        if not lose:
            self.receive(*entry)

    @rule(seconds=st.sampled_from([0.01, GAP_GRACE, ASK_AGAIN, SILENCE]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(lose=st.booleans())
    def asks(self, lose: bool) -> None:
        index = self.stream.question(self.now)
        assert (index is not None) == (not self.stream.complete and self.now >= self.asked_at)
        if index is not None:
            assert self.stream.question(self.now) is None  # not twice at once
            assert index == len(self.client)
            if not lose:
                self.bus += [(self.attempt, output) for output in self.outputs[self.attempt][index:]]

    @precondition(lambda self: not self.stream.complete and self.attempt < 4)
    @rule()
    def instance_dies(self) -> None:
        self.migrate()

    @invariant()
    def the_client_has_exactly_the_sequence(self) -> None:
        assert self.client == self.want[: len(self.client)]
        assert self.stream.complete == (len(self.client) == LENGTH)
        self.asked_at = self.stream.ask_at()

    def teardown(self) -> None:
        """Without further faults it ends: by pushes, or by asking."""
        for _ in range(2 * LENGTH):
            self.draws(self.attempt)
            self.now += SILENCE
            index = self.stream.question(self.now)
            for output in self.outputs[self.attempt][index or 0 :]:
                self.receive(self.attempt, output)
        assert self.stream.complete and self.client == self.want


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_silence_is_two_seconds_and_a_gap_is_asked_about_at_once() -> None:
    stream = TokenStream(SILENCE, 10.0)
    stream.resume(1, 10.0)
    assert stream.question(11.9) is None and stream.question(12.0) == 0
    assert stream.question(12.1) is None and stream.question(14.0) == 0
    stream.receive(1, Output(2, 7), None, 15.0)
    assert stream.question(15.0) is None and stream.question(15.0 + GAP_GRACE) == 0
    assert stream.question(15.1) is None and stream.question(15.1 + ASK_AGAIN) == 0
    assert [t.output.index for t in stream.receive(1, Output(0, 5), None, 15.7)] == [0]
    assert [t.output.index for t in stream.receive(1, Output(1, 6), None, 15.8)] == [1, 2]
    assert stream.ask_at() == 15.8 + SILENCE


def test_after_the_bus_was_away_it_asks_at_once_but_not_for_ever() -> None:
    stream = TokenStream(SILENCE, 0.0)
    stream.resume(1, 0.0)
    stream.ask_now(50.0)
    assert stream.question(50.0) == 0 and stream.question(50.0) is None
    assert stream.ask_at() == 52.0 and stream.progress == 50.0


def test_nothing_comes_after_the_end() -> None:
    stream = TokenStream(SILENCE, 0.0)
    stream.resume(1, 0.0)
    assert len(stream.receive(1, Output(0, 5, "stop"), Usage(), 0.0)) == 1
    assert stream.complete and stream.question(100.0) is None
    assert stream.receive(1, Output(1, 6), None, 1.0) == []
