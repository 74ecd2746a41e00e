"""Many requests through a model: an engine, and what it is made of."""

from mambakit.inference.engine import Engine
from mambakit.inference.requests import LogProbs, Request, State

__all__ = ["Engine", "LogProbs", "Request", "State"]
