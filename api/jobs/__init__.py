"""Jobs over HTTP: ``endpoints`` (the routes), ``service`` (what they do), ``schemas`` (what they say), ``models`` (what
model is meant)."""

from api.jobs.endpoints import router

__all__ = ["router"]
