"""What is learnt of instances: predictions follow what happens, and forget it while nothing does."""

from __future__ import annotations

import pytest

from services.conductor.scheduling import Ask, Decision, Objectives, Rejection, Scheduler, policy
from shared.latency import OnlineCorrection, PrefillModel
from shared.messages import Load
from tests.scheduling.fleet import BLOCK, fleet


def test_predictions_are_corrected_by_what_happens() -> None:
    ledger = fleet(2, 1)
    for _ in range(100):
        ledger.prefills.observe("p0", 1000, 500, 1.0)  # twice what the model says
    view = ledger.view(b"", {}, 0.0).prefill
    assert list(view.seconds(1000, 0)) == [pytest.approx(2.0, rel=0.01), 1.0]
    ledger.report("p0", Load(queued=1, queue_ms=300.0), 0.0)
    assert ledger.prefills.queue(0.0)[0] == pytest.approx(0.6, rel=0.01)
    ledger.put_prefill("p0", "a0", PrefillModel(0.0, 0.002, 0.0))  # it publishes a better model: new truth to learn
    for _ in range(100):
        ledger.prefills.observe("p0", 1000, 500, 1.0)
    assert ledger.view(b"", {}, 0.0).prefill.seconds(1000, 0)[0] == pytest.approx(2.0, rel=0.01)
    ledger.prefills.observe("nobody", 1, 1, 1.0)


def test_what_was_learnt_of_prefill_fades_while_nothing_is_queued() -> None:
    ledger = fleet(1, 1)
    for _ in range(100):
        ledger.prefills.observe("p0", 1000, 500, 1.0)  # twice what the model says
    slow = ledger.view(b"", {}, 0.0).prefill
    now = 0.0
    for load in (Load(queued=1), Load(running=1), Load(queued_tokens=9), Load(queue_ms=1.0)):
        ledger.report("p0", Load(), now)
        ledger.report("p0", load, now + 100.0)  # what was idle until just now is not told by one report
        ledger.report("p0", load, now + 200.0)
        ledger.report("p0", Load(), now + 300.0)
        assert ledger.view(b"", {}, now).prefill.fastest == slow.fastest
        now += 300.0
    for second in range(180):
        ledger.report("p0", Load(), now + second)
    view = ledger.view(b"", {}, now).prefill
    assert view.seconds(1000, 0)[0] == pytest.approx(1.0, rel=0.03)
    assert view.fastest and slow.fastest
    assert view.fastest[0] == pytest.approx(slow.fastest[0] / 2, rel=0.03)


def test_steps_are_timed_from_reports_of_a_busy_batch() -> None:
    ledger = fleet(1, 1)
    for second in range(100):  # twenty steps a second, where the model says eleven milliseconds a step
        load = Load(running=1, busy=True, progress=20 * second, total_blocks=10, room_blocks=10)
        ledger.report("d0", load, float(second))
        ledger.report("d0", load, second + 0.1)  # too soon to tell anything
    seat = ledger.decodes.seats["d0"]
    assert seat.model.seconds(1, 0) == pytest.approx(0.05, rel=0.02)
    corrected = seat.correction
    ledger.report("d0", Load(running=0, busy=False, progress=2000), 200.0)
    ledger.report("d0", Load(running=1, busy=True, progress=2001), 300.0)  # was idle in between
    assert seat.correction == corrected


def test_a_stall_that_is_over_refuses_nobody_for_ever() -> None:
    """Who refuses everybody sees no steps: an idle mesh is asked again within minutes."""
    ledger, scheduler = fleet(1, 1), Scheduler(policy("global_cache"))
    ask, wanted = Ask(100, 3, BLOCK, 1000, 16), Objectives(60.0, 0.05)
    seat, stalled = ledger.decodes.seats["d0"], 120
    for second in range(stalled):  # a step takes 250 ms, where the model says eleven
        load = Load(running=1, busy=True, progress=4 * second, total_blocks=99, room_blocks=99)
        ledger.report("d0", load, float(second))
    assert seat.correction.factor > 10
    refused = scheduler.decide(ask, ledger.view(b"", {}, float(stalled)), wanted)
    assert isinstance(refused, Rejection) and refused.reason == "tbt"
    for second in range(stalled, stalled + 300):
        ledger.report("d0", Load(progress=4 * stalled, total_blocks=99, room_blocks=99), float(second))
    assert seat.correction.factor == pytest.approx(1.0, abs=0.01)
    assert isinstance(scheduler.decide(ask, ledger.view(b"", {}, float(stalled + 300)), wanted), Decision)


def test_what_was_learnt_of_steps_does_not_fade_while_some_are_taken() -> None:
    ledger = fleet(1, 1)
    seat = ledger.decodes.seats["d0"]
    seat.correction, load = OnlineCorrection(10.0), Load()
    for second in range(300):  # eleven milliseconds by the model, ten times as many by the clock
        load = Load(running=1, busy=True, progress=round(second / 0.11), total_blocks=10, room_blocks=10)
        ledger.report("d0", load, float(second))
    assert seat.correction.factor == pytest.approx(10.0, rel=0.1)
    learnt = seat.correction
    for second in range(300, 600):  # stuck: nothing is learnt and nothing forgotten
        ledger.report("d0", load, float(second))
    assert seat.correction == learnt
