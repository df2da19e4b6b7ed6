"""The wire form of every message and error: round trip, version, garbage."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import messages
from shared.errors import MooncakeError, ProtocolError, WireError
from shared.messages import PROTOCOL, Admission, AnyMessage, Message, Output, Ref, Sampling, Submit, decode, encode

A, B = Ref("a", 1), Ref("b", 2**63)


def submit() -> Submit:
    admission = Admission(
        gateway=A,
        tokens=b"\0" * 8,
        prompt_tokens=2,
        root=b"r",
        keys=b"",
        sampling=Sampling(max_tokens=5, seed=-(2**63)),
        lists=3,
    )
    return Submit(sender=A, target=B, request="q", attempt=1, admission=admission, decode=B)


@pytest.mark.parametrize("kind", get_args(AnyMessage), ids=lambda k: k.__name__)
def test_every_message_is_tagged_documented_and_round_trips(kind: type[Message]) -> None:
    schema = msgspec.json.schema(kind)
    assert schema and kind.__struct_config__.tag
    hints: dict[str, Any] = {
        "sender": A,
        "target": B,
        "request": "q",
        "attempt": 2,
        "admission": submit().admission,
        "decode": B,
        "prefill": A,
        "agent": B,
        "token": 2**63,
        "slots": [3, 1],
        "have": b"\x01",
        "output": Output(0, 7, "stop"),
        "blocks": [1],
        "number": 9,
        "attempts": [("q", 1, True)],
        "index": 4,
        "entries": [messages.TokenEntry("q", 1, Output(0, 1))],
        "error": WireError("refused", "no"),
        "unknown": [("q", 1)],
        "load": messages.Load(queued=1),
        "outputs": [Output(0, 1)],
        "tenant": "t",
    }
    fields = {f.name for f in msgspec.structs.fields(kind) if f.required}
    message = kind(**{name: hints[name] for name in fields})
    assert decode(encode(message)) == message


WITHOUT_ATTEMPT = (
    messages.LiveList,
    messages.LiveReply,
    messages.TokenBatch,
    messages.Promises,
    messages.Replicas,
    messages.ReplicasDone,
    messages.FindTrace,
    messages.FoundTrace,
)


def test_messages_about_an_attempt_name_request_attempt_and_both_incarnations() -> None:
    for kind in get_args(AnyMessage):
        if kind not in WITHOUT_ATTEMPT:
            assert issubclass(kind, messages.AttemptMessage), kind
        assert {"sender", "target"} <= set(kind.__struct_fields__)


def test_another_protocol_version_is_refused_by_number() -> None:
    payload = bytes((PROTOCOL + 1,)) + encode(submit())[1:]
    with pytest.raises(ProtocolError, match=f"protocol {PROTOCOL + 1}.*{PROTOCOL}"):
        decode(payload)


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    for payload in (garbage, bytes((PROTOCOL,)) + garbage):
        try:
            assert isinstance(decode(payload), Message)
        except ProtocolError:
            pass


@given(st.integers(0, 400))
def test_truncation_is_a_protocol_error(cut: int) -> None:
    whole = encode(submit())
    if cut < len(whole):
        with pytest.raises(ProtocolError):
            decode(whole[:cut])


@pytest.mark.parametrize("code", sorted(MooncakeError.by_code))
def test_every_error_comes_back_as_its_class(code: str) -> None:
    cls = MooncakeError.by_code[code]
    error = cls("why", field="f", retry_after_ms=5)
    back = MooncakeError.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_wire()), type=WireError))
    assert type(back) is cls and (back.message, back.field, back.retry_after_ms) == ("why", "f", 5)
    assert inspect.getdoc(cls)


def test_an_unknown_error_code_is_still_an_error() -> None:
    assert type(MooncakeError.from_wire(WireError("newer_than_us", "why"))) is MooncakeError
