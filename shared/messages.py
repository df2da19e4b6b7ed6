"""The control messages of the mesh: typed, MessagePack, one protocol version.

Every message between a gateway, a prefill and a decode instance names the request, the attempt, the sender
and the target *incarnation*; another incarnation refuses it. All are idempotent. Times travel as remaining
or elapsed milliseconds, never as a clock reading. The rules named here (``tombstone``, ``landing_admits`` ...)
are those of the checked protocol models; the state machines that follow them live in the services.

Wire form: one byte protocol version, then a MessagePack map with a ``t`` tag.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shared.errors import MALFORMED, ProtocolError, WireError
from shared.message import AttemptMessage as AttemptMessage
from shared.message import Message as Message
from shared.message import Ref as Ref
from shared.peer_messages import FindTrace as FindTrace
from shared.peer_messages import FoundTrace as FoundTrace
from shared.peer_messages import Promise as Promise
from shared.peer_messages import Promises as Promises
from shared.peer_messages import Replicas as Replicas
from shared.peer_messages import ReplicasDone as ReplicasDone
from shared.peer_messages import Step as Step

PROTOCOL = 1


# -- what describes a request ----------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. ``seed`` is always set by the gateway; each draw at ``position`` (index among the
    outputs) uses a generator seeded by hash(seed, choice, position), so a resumed request draws the same.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off. ``stop_ids`` end the output (EOS ids
    are put there by the gateway unless ``ignore_eos``). ``max_tokens`` counts all outputs of the request,
    those before a migration included.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: list[int] = []
    min_tokens: int = 0
    choices: int = 1
    logprobs: int = -1  # -1 off, else the number of alternatives
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}


class Source(msgspec.Struct, frozen=True):
    """An agent that probably holds the first ``blocks`` blocks of the prompt. A hint: the owner decides."""

    agent: str
    blocks: int


class Admission(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that an instance must know of a request; the same in submit, admit and landing request.

    ``tokens``: packed uint32, the prompt and, after a migration, the outputs delivered so far.
    ``prompt_tokens``: length of the original prompt (usage and output index 0 count from there).
    ``root``: parent of the first block key (namespace with tenant salt). ``keys``: chain of all full blocks
    of ``tokens``. ``age_ms``: time since the *request* arrived (age is the request's, not the attempt's).
    ``deadline_ms``: time left until its first token is due, at the latest by its TTFT objective; negative when that has
    passed. ``priority``: higher is more urgent. They order prefill's queue, and are hints.
    ``lists``: number of the last live list that the gateway sent to this instance; only later ones count.
    ``tenant``: whose quota of cache its blocks count against.
    """

    gateway: Ref
    tokens: bytes
    prompt_tokens: int
    root: bytes
    keys: bytes
    sampling: Sampling
    lists: int
    age_ms: int = 0
    deadline_ms: int = 0
    priority: int = 0
    expected_output: int = 0
    sources: list[Source] = []
    tenant: str = ""


# -- gateway -> instance -----------------------------------------------------------------------------------


class Submit(AttemptMessage, frozen=True, kw_only=True, tag="submit"):
    """To prefill. ``fetch_blocks``: the prefix length the scheduler planned to have from the store (0: compute).
    ``prefix_blocks``: what it expects to be there, from wherever, when the prompt's turn comes: a hint, for reports.
    Answer: :class:`Accepted` or :class:`RefusedReply`. Repeated until answered (``ask_again``)."""

    admission: Admission
    decode: Ref
    fetch_blocks: int = 0
    prefix_blocks: int = 0


class Admit(AttemptMessage, frozen=True, kw_only=True, tag="admit"):
    """To decode: a byte reservation, not memory. Answer: Accepted or RefusedReply."""

    admission: Admission
    prefill: Ref


class Cancel(AttemptMessage, frozen=True, kw_only=True, tag="cancel"):
    """The fast path out; leaves a tombstone, also for an attempt never seen. Answered with Accepted when asked."""

    reason: str = ""


class LiveList(Message, frozen=True, kw_only=True, tag="live"):
    """Once a second, gateway -> instance: the attempts that are live there, numbered.

    ``attempts``: (request, attempt, accepted). An attempt is listed from when it is sent; ``accepted`` is
    False until the instance said so (``list_accepted``). ``acked``: (request, attempt) whose outputs the
    gateway has in full, so that the instance may forget them. Answer: :class:`LiveReply`.
    """

    number: int
    attempts: list[tuple[str, int, bool]]
    acked: list[tuple[str, int]] = msgspec.field(default_factory=list)


class Since(AttemptMessage, frozen=True, kw_only=True, tag="since"):
    """Gateway asks again for the outputs from ``index`` on, at most ``most`` of them (0: as many as fit in an answer).
    Answer: SinceReply or RefusedReply(unknown_attempt)."""

    index: int
    choice: int = 0
    most: int = 0


# -- prefill <-> decode --------------------------------------------------------------------------------------


class LandingRequest(AttemptMessage, frozen=True, kw_only=True, tag="landing_request"):
    """p -> d, when p is about to start. Carries what admit carries: the first to come admits
    (``landing_admits``); repeated until answered (``resend_landing``). Answer: LandingGrant or RefusedReply."""

    admission: Admission
    agent: Ref  # p's store agent, the writer


class LandingGrant(AttemptMessage, frozen=True, kw_only=True, tag="landing_grant"):
    """d -> p. The landing lies at ``agent`` under ``token``; block i of the prompt goes to slot ``slots[i]``.

    ``have``: one bit per block (LSB of byte 0 = block 0), set where d keeps or fetches the block itself and p
    must not write. The partial last block is never in ``have``.
    """

    agent: Ref
    token: int
    slots: list[int]
    have: bytes
    segment: str = ""  # of the target's registered memory; "": its pool (one-sided writers may be given another)


class Start(AttemptMessage, frozen=True, kw_only=True, tag="start"):
    """p -> d with the first token; repeated until answered Ready (``resend_start``).
    Answer: Ready or RefusedReply. ``state`` is "ready" for a finished attempt too."""

    output: Output
    usage: Usage | None = None  # so that d can answer tokens.since(0) in full


class Ready(AttemptMessage, frozen=True, kw_only=True, tag="ready"):
    """d -> p: everything landed (or the attempt already ended here); p may let go of the prompt's blocks.
    ``complete`` False: heard, not complete yet, ask again."""

    complete: bool = True


class Need(AttemptMessage, frozen=True, kw_only=True, tag="need"):
    """d -> p: d could not fetch these blocks itself; p streams them. Answer: Accepted or RefusedReply."""

    blocks: list[int]


# -- instance -> gateway -------------------------------------------------------------------------------------


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    token: int
    logprob: float


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One drawn token. ``index`` counts the request's outputs from 0. ``finish`` is "" or the reason
    ("stop", "length", "error"), always inside the entry of the last token (``finish_inside``)."""

    index: int
    token: int
    finish: str = ""
    choice: int = 0
    logprob: float = 0.0
    top: list[Logprob] = []


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sent with output 0. Tokens of the prompt that were not computed, and where they came from."""

    cached_tokens: int = 0
    local_blocks: int = 0
    fetched_blocks: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0


class TokenEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    request: str
    attempt: int
    output: Output
    usage: Usage | None = None


class TokenBatch(Message, frozen=True, kw_only=True, tag="tokens"):
    """p or d -> gateway: one message per step and gateway. Not answered."""

    entries: list[TokenEntry]


class Gone(AttemptMessage, frozen=True, kw_only=True, tag="gone"):
    """An instance gives an attempt up by itself (drain, engine failure, agent gone); the gateway leaves it at once."""

    error: WireError


# -- answers -----------------------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance says of itself, in heartbeats and in answers. Hints to the scheduler; base units.

    Prefill: ``queued`` requests, ``queued_tokens`` not yet computed, ``queue_ms`` predicted time to compute them.
    Decode: ``running`` sequences of at most ``batch_limit`` (0: not told), ``kv_tokens`` they attend to,
    ``room_blocks`` that may still be promised.
    ``progress`` counts engine steps; ``busy`` says whether it should be moving.
    """

    queued: int = 0
    queued_tokens: int = 0
    queue_ms: float = 0.0
    running: int = 0
    batch_limit: int = 0
    kv_tokens: int = 0
    total_blocks: int = 0
    room_blocks: int = 0
    progress: int = 0
    busy: bool = False
    draining: bool = False


class Accepted(AttemptMessage, frozen=True, kw_only=True, tag="accepted"):
    load: Load | None = None


class RefusedReply(AttemptMessage, frozen=True, kw_only=True, tag="refused"):
    error: WireError
    load: Load | None = None


class LiveReply(Message, frozen=True, kw_only=True, tag="live_reply"):
    """``unknown``: listed as accepted, but neither held nor finished in good order; the gateway leaves those."""

    number: int
    unknown: list[tuple[str, int]]
    load: Load


class SinceReply(AttemptMessage, frozen=True, kw_only=True, tag="since_reply"):
    """Outputs from ``index`` on, as far as drawn and asked for."""

    index: int
    outputs: list[Output]
    usage: Usage | None = None


AnyMessage = (
    Submit
    | Admit
    | Cancel
    | LiveList
    | Since
    | LandingRequest
    | LandingGrant
    | Start
    | Ready
    | Need
    | TokenBatch
    | Gone
    | Accepted
    | RefusedReply
    | LiveReply
    | SinceReply
    | Promises
    | Replicas
    | ReplicasDone
    | FindTrace
    | FoundTrace
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return bytes((PROTOCOL,)) + _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Raises ProtocolError, naming both versions or the offending field."""
    if not payload or payload[0] != PROTOCOL:
        theirs = payload[0] if payload else "nothing"
        raise ProtocolError(f"peer speaks protocol {theirs}, this process {PROTOCOL}", field="protocol")
    try:
        message: AnyMessage = _decoder.decode(memoryview(payload)[1:])
    except MALFORMED as e:
        raise ProtocolError(f"not a message: {e}") from e
    return message
