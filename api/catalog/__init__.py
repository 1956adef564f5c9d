"""Presets, model inspection and plans over HTTP: the choices and their effects. Nothing here changes anything."""

from api.catalog.endpoints import router

__all__ = ["router"]
