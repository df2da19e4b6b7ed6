"""A ledger with some instances, all alike."""

from __future__ import annotations

from services.conductor.scheduling import Ledger
from shared.latency import DecodeModel, PrefillModel

BLOCK = 4
PREFILL = PrefillModel(0.0, 0.001, 0.0)
DECODE = DecodeModel(0.01, 0.001, 0.0)


def fleet(prefills: int = 2, decodes: int = 2) -> Ledger:
    ledger = Ledger(link_rate=1e6)
    for i in range(prefills):
        ledger.put_prefill(f"p{i}", f"a{i}", PREFILL)
        ledger.put_agent(f"a{i}", prefill=True)
    for i in range(decodes):
        ledger.put_decode(f"d{i}", DECODE)
    return ledger
