"""Sweeps over HTTP. ``endpoints``: the routes; ``matrix``: from a matrix of values to the jobs it means."""

from api.sweeps.endpoints import router

__all__ = ["router"]
