"""Liveness of instances: what makes one suspected, dead, alive again, refused, forgotten."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.conductor.dispatch.roster import RECONNECT_GRACE, Change, Roster, State
from shared.blocks import Namespace
from shared.messages import Load, Ref
from shared.records import PREFILL, InstanceRecord

SUSPECT, DEAD, HUNG = 3.0, 10.0, 60.0
NAMESPACE = Namespace(
    model="m", weights="w", tokenizer="t", dtype="float32", layers=2, kv_heads=1, head_dim=4, block_size=4
)


def record(id: str = "p", incarnation: int = 1, namespace: Namespace = NAMESPACE, **more: Any) -> InstanceRecord:
    columns: dict[str, Any] = {
        "ref": Ref(id, incarnation),
        "role": PREFILL,
        "node": id,
        "model": "m",
        "namespace": namespace,
        "proof": namespace.proof(),
        "agent": Ref("a", 1),
        "context_length": 100,
    }
    return InstanceRecord(**{**columns, **more})


def roster(*records: InstanceRecord) -> Roster:
    made = Roster(SUSPECT, DEAD, HUNG)
    for each in records:
        made.put(each, 0.0)
    return made


def kinds(changes: list[Change]) -> list[str]:
    return [change.kind for change in changes]


def is_open(made: Roster) -> bool:
    return made.members["p"].open


def state(made: Roster, id: str = "p") -> State:
    return made.members[id].state


def test_silence_suspects_then_kills_and_a_word_revives() -> None:
    made, ref = roster(record()), Ref("p", 1)
    assert kinds(made.tick(2.9)) == [] and is_open(made)
    assert kinds(made.tick(3.1)) == ["suspected"] and not is_open(made)
    assert kinds(made.heard(ref, None, 4.0)) == ["revived"] and is_open(made)
    assert kinds(made.tick(14.1)) == ["died"] and kinds(made.tick(20.0)) == []
    assert kinds(made.heard(ref, Load(), 21.0)) == ["revived"]
    assert made.heard(Ref("p", 2), None, 21.0) == [] and made.heard(Ref("x", 1), None, 21.0) == []


def test_no_responders_is_death_at_once_except_right_after_the_bus_came_back() -> None:
    made, ref = roster(record()), Ref("p", 1)
    made.bus(False, 1.0)
    assert made.no_responders(ref, 2.0) == []
    made.bus(True, 30.0)
    assert made.no_responders(ref, 30.0 + RECONNECT_GRACE - 0.1) == []
    assert kinds(made.no_responders(ref, 30.0 + RECONNECT_GRACE)) == ["died"]


def test_the_clock_stands_still_while_the_bus_is_down() -> None:
    made = roster(record())
    made.bus(False, 1.0)
    assert made.tick(100.0) == []
    made.bus(True, 200.0)
    assert made.tick(202.0) == [] and kinds(made.tick(203.5)) == ["suspected"]


def test_a_new_incarnation_replaces_at_once() -> None:
    made = roster(record())
    changes = made.put(record(incarnation=2), 1.0)
    assert kinds(changes) == ["died", "left", "joined"]
    assert changes[0].member.record.ref.incarnation == 1 and made.get(Ref("p", 1)) is None
    assert made.get(Ref("p", 2))


def test_a_hung_engine_is_seen_and_a_busy_one_is_not_killed() -> None:
    made, ref = roster(record()), Ref("p", 1)
    for second in range(1, 200):
        made.heard(ref, Load(busy=True, progress=second // 50), float(second))
        assert kinds(made.tick(float(second))) == []
    changes = []
    for second in range(200, 270):
        changes += made.heard(ref, Load(busy=True, progress=3), float(second))
        changes += made.tick(float(second))
    assert kinds(changes) == ["died"]
    assert kinds(made.heard(ref, Load(busy=True, progress=4), 270.0)) == ["revived"]
    for second in range(271, 400):  # idle does not count as hung
        made.heard(ref, Load(busy=False, progress=4), float(second))
        assert made.tick(float(second)) == []


def test_the_metadata_store_may_forget_who_is_heard() -> None:
    made, ref = roster(record()), Ref("p", 1)
    made.heard(ref, None, 10.0)
    assert made.unregister("p", 11.0) == [] and is_open(made)
    assert kinds(made.replace_all([], 12.0)) == []
    assert kinds(made.tick(25.0)) == ["died", "left"] and not made.members
    assert made.unregister("p", 30.0) == []


def test_who_is_gone_from_both_is_dropped_at_once() -> None:
    made = roster(record())
    assert kinds(made.replace_all([], 5.0)) == ["died", "left"]
    made = roster(record())
    made.unregister("p", 1.0)
    assert kinds(made.no_responders(Ref("p", 1), 1.1)) == ["died", "left"]


def test_records_update_quietly() -> None:
    made = roster(record(beat=1))
    assert kinds(made.put(record(beat=1), 1.0)) == []
    assert kinds(made.put(record(beat=2, load=Load(queued=3)), 1.0)) == ["updated"]
    assert made.members["p"].load.queued == 3


def test_draining_gets_no_new_work() -> None:
    made = roster(record())
    made.heard(Ref("p", 1), Load(draining=True), 1.0)
    assert not is_open(made) and state(made) is State.ALIVE


@pytest.mark.parametrize(
    ("field", "value"), [("model", "x"), ("weights", "y"), ("dtype", "bfloat16"), ("block_size", 8), ("lora", "l")]
)
def test_d2_another_namespace_is_refused_naming_the_field(field: str, value: Any) -> None:
    made = roster(record("a"))
    other = msgspec.structs.replace(NAMESPACE, **{field: value})
    changes = made.put(record("b", namespace=other), 0.0)
    assert kinds(changes) == ["refused"] and changes[0].member.refused == field
    assert not made.members["b"].open and [m.record.ref.id for m in made.accepted()] == ["a"]
    assert made.heard(Ref("b", 1), None, 1.0) == [] and made.namespace == NAMESPACE
    assert kinds(made.tick(100.0)) == ["died"]  # only a


def test_a_wrong_proof_is_refused() -> None:
    changes = roster().put(record(proof=b"wrong"), 0.0)
    assert kinds(changes) == ["refused"] and changes[0].member.refused == "proof"


def test_the_majority_decides_at_the_start_whatever_the_order() -> None:
    other = msgspec.structs.replace(NAMESPACE, weights="other")
    made = roster()
    made.replace_all([record("x", namespace=other), record("a"), record("b")], 0.0)
    assert made.namespace == NAMESPACE and state(made, "x") is State.REFUSED


def test_when_all_that_agreed_are_gone_the_refused_take_over() -> None:
    other = msgspec.structs.replace(NAMESPACE, weights="other")
    made = roster(record("a"), record("x", namespace=other), record("bad", proof=b"wrong"))
    made.replace_all([record("x", namespace=other), record("bad", proof=b"wrong")], 20.0)
    assert kinds(made.tick(21.0)) == ["joined"] and made.namespace == other
    assert state(made, "bad") is State.REFUSED


def test_there_is_no_namespace_without_instances() -> None:
    made = roster()
    assert made.namespace is None
    made.put(record(), 0.0)
    made.replace_all([], 20.0)
    assert made.namespace is None


def test_the_conductors_own_lateness_is_nobodys_silence() -> None:
    made = roster(record())
    made.excuse(12.0, 13.0)  # the loop came round at 13 instead of 1
    assert made.tick(13.0) == [] and is_open(made)
    assert kinds(made.tick(15.5)) == ["suspected"]
    made.excuse(100.0, 20.0)  # never heard later than now
    assert made.members["p"].heard == 20.0
