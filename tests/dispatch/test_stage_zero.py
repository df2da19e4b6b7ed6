"""Stage 0 refuses nothing that a decision would accept, whatever a body has beside its prompt."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from services.conductor.dispatch.gatekeeper import Gatekeeper
from services.conductor.dispatch.settings import DispatchSettings
from services.conductor.scheduling import Ask, Decision, Ledger, Objectives, Scheduler, policy
from shared.blocks import KEY
from shared.errors import Contended
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Load

BLOCK = 32
models = st.builds(PrefillModel, st.floats(0, 2), st.floats(0, 1e-2), st.floats(0, 1e-5))


@given(
    model=models,
    queue_ms=st.floats(0, 4000),
    tokens=st.integers(1, 4000),
    share=st.floats(0, 1),
    size=st.integers(0, 1 << 26),
    slo_ms=st.integers(1, 5000),
    hit=st.booleans(),
)
@example(PrefillModel(0.1, 0.0, 1e-5), 0.0, 33, 0.0, 1 << 20, 110, True)  # escapes: 2.6 s by the size of the body
@example(PrefillModel(0.0, 0.0, 0.0), 1.0, 32, 1.0, 0, 1, True)
def test_what_is_refused_for_its_first_token_every_decision_would_refuse(
    model: PrefillModel, queue_ms: float, tokens: int, share: float, size: int, slo_ms: int, hit: bool
) -> None:
    ledger, settings = Ledger(), DispatchSettings(slo_tbt_ms=60_000)
    ledger.put_prefill("p", "a", model)
    ledger.put_decode("d", DecodeModel(0.01, 0.0, 0.0))
    ledger.report("p", Load(queued=1, queue_ms=queue_ms), 0.0)
    ask = Ask(tokens, tokens // BLOCK, BLOCK, 1000, 1)
    view = ledger.view(bytes(KEY) * ask.blocks, {"a": ask.blocks} if hit else {}, 0.0)
    decided = Scheduler(policy("global_cache")).decide(ask, view, Objectives(slo_ms / 1000, 60.0))
    try:
        Gatekeeper(settings, ledger).consider(0.0, size, slo_ms, 0, int(share * tokens), 1)
    except Contended:
        assert not isinstance(decided, Decision)
