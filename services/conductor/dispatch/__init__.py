"""The dispatcher: places requests, runs their attempts, delivers their tokens, migrates them."""

from services.conductor.dispatch.dispatcher import MeshDispatcher
from services.conductor.dispatch.settings import DispatchSettings

__all__ = ["DispatchSettings", "MeshDispatcher"]
