"""Scheduling without I/O, shared by the live conductor and the simulator: policies, admission and the ledger."""

from services.conductor.scheduling.decision import Candidate, Decision, Rejection
from services.conductor.scheduling.ledger import Booking, Ledger
from services.conductor.scheduling.matches import Matches
from services.conductor.scheduling.policy import Policy, PolicyOptions
from services.conductor.scheduling.registry import POLICIES, policy
from services.conductor.scheduling.returning import Kept, Lane, Shortage, VirtualQueue
from services.conductor.scheduling.scheduler import Objectives, Scheduler
from services.conductor.scheduling.urgency import Turn
from services.conductor.scheduling.views import Ask, DecodeView, PrefillView, SourceView, View

__all__ = [
    "POLICIES",
    "Ask",
    "Booking",
    "Candidate",
    "DecodeView",
    "Decision",
    "Kept",
    "Lane",
    "Ledger",
    "Matches",
    "Objectives",
    "Policy",
    "PolicyOptions",
    "PrefillView",
    "Rejection",
    "Scheduler",
    "Shortage",
    "SourceView",
    "Turn",
    "View",
    "VirtualQueue",
    "policy",
]
