"""All policies by name."""

from __future__ import annotations

from collections.abc import Callable

from services.conductor.scheduling.baselines import LocalCache, RandomChoice, RoundRobin
from services.conductor.scheduling.global_cache import GlobalCache
from services.conductor.scheduling.least_loaded import LeastLoaded
from services.conductor.scheduling.paper import Paper
from services.conductor.scheduling.policy import Policy, PolicyOptions

POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    cls.name: cls for cls in (GlobalCache, Paper, LeastLoaded, LocalCache, RoundRobin, RandomChoice)
}


def policy(name: str, options: PolicyOptions | None = None) -> Policy:
    """Raises KeyError for an unknown name."""
    return POLICIES[name](options or PolicyOptions())
