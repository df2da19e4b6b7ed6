"""A prefill instance as a process."""

from __future__ import annotations

from services.prefill.service import Prefill
from services.prefill.settings import PrefillSettings
from services.store.client import StoreClient
from shared.config import load
from shared.instance.host import Parts
from shared.instance.process import run
from shared.records import PREFILL


def main() -> None:
    settings = load(PrefillSettings)

    def build(parts: Parts) -> Prefill:
        return Prefill(parts.ref, parts.bus, parts.store, parts.engine, parts.compute, parts.prefill_model, settings)

    run(PREFILL, settings, StoreClient.connect, build)
