"""By when a first token is due: short prompts before long ones, within bounds. Pure."""

from __future__ import annotations


def due(objective: float, compute: float, overtake: float) -> float:
    """Seconds from a request's arrival, at most its ``objective``: what prefill orders its queue by.

    ``compute``: seconds of its prefill. A prompt may be overtaken by those that come up to ``overtake`` times its own
    ``compute`` after it (0: by objective alone). Nobody starves: an objective stands, and who comes after it has passed
    goes behind.
    """
    return min(objective, overtake * compute) if overtake else objective


def latest(objective: float, compute: float, thrift: float) -> float:
    """Seconds from its arrival by which a request must be expected to have its first token, to be let in; at most its
    ``objective``.

    Under overload the seconds of prefill are what is shared out, and a long prompt takes those of many short ones.
    With ``thrift`` it is let in only where it waits less: the slack that its ``compute`` leaves of the objective is
    divided by 1 + thrift · compute / objective. An idle mesh still takes whatever it can do in time.
    """
    if not thrift or compute >= objective:
        return objective
    return compute + (objective - compute) / (1.0 + thrift * compute / objective)
