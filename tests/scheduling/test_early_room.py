"""Stage 0 looks at decode's room before anything is tokenized: what it refuses, every decision would refuse."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.conductor.scheduling import Ask, Kept, Ledger, Objectives, Rejection, Scheduler, policy
from services.conductor.scheduling.decodes import Decodes
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Load

BLOCK = 32
WANTED = Objectives(ttft=600.0, tbt=60.0)
DECODE = DecodeModel(0.02, 0.001, 0.0)


def reported(total: int, room: int, batch: int = 0) -> Load:
    return Load(total_blocks=total, room_blocks=min(room, total), batch_limit=batch)


pools = st.lists(st.builds(reported, st.integers(1, 60), st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=4)


@given(
    empty=pools,
    filled=st.lists(st.integers(0, 60), min_size=4, max_size=4),
    closed=st.sets(st.integers(0, 3)),
    least=st.integers(0, 1500),
    more=st.integers(0, 500),
    output=st.integers(1, 64),
    kept=st.integers(0, 4),
)
def test_what_has_no_room_at_stage_0_has_none_in_a_decision(
    empty: list[Load], filled: list[int], closed: set[int], least: int, more: int, output: int, kept: int
) -> None:
    ledger = Ledger()
    ledger.put_prefill("p", "a", PrefillModel(0.01, 1e-4, 0.0))
    for i, load in enumerate(empty):
        ledger.put_decode(f"d{i}", DECODE)
        ledger.report(f"d{i}", load, 0.0)
        ledger.report(f"d{i}", reported(load.total_blocks, filled[i], load.batch_limit), 0.0)
        ledger.set_open(f"d{i}", i not in closed)
    places = ledger.decodes.places(-(-(least + 1) // BLOCK))
    tokens = least + more + 1
    ask = Ask(tokens, tokens // BLOCK, BLOCK, 1000, output)
    decided = Scheduler(policy("global_cache")).decide(ask, ledger.view(b"", {}, 0.0), WANTED, Kept(0.0, kept))
    assert places > kept or isinstance(decided, Rejection)


def decodes(*loads: Load) -> Decodes:
    made = Decodes()
    for i, load in enumerate(loads):
        made.put(f"d{i}", DECODE)
        made.report(f"d{i}", reported(load.total_blocks, 90), 0.0)  # when it was empty
        made.report(f"d{i}", load, 0.0)
    return made


def test_places_are_counted_in_instances_that_take_work() -> None:
    two = decodes(reported(100, 35), reported(100, 19))
    assert two.places(10) == 4 and two.places(20) == 1 and two.places(36) == 0
    two.set_open("d0", False)
    assert two.places(10) == 1


def test_what_is_larger_than_an_empty_instance_gets_all_of_one() -> None:
    assert decodes(reported(100, 90)).places(95) == 1 and decodes(reported(100, 89)).places(95) == 0


def test_what_fits_no_pool_is_not_called_contended() -> None:
    assert decodes(reported(100, 0)).places(101) == math.inf
    assert decodes(reported(100, 0)).places(100) == 0
    assert Decodes().places(1) == math.inf


def test_a_pool_that_nobody_has_reported_yet_has_room() -> None:
    one = Decodes()
    one.put("d0", DECODE)
    assert one.places(1000) > 1
