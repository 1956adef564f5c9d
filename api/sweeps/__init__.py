"""Sweeps over HTTP. ``endpoints``: the routes; ``matrix``: turns a matrix of values into the jobs that it means."""

from api.sweeps.endpoints import router

__all__ = ["router"]
