"""What there is to choose from, and what a choice would mean: presets and plans. Nothing here changes anything."""

from api.catalog.endpoints import router

__all__ = ["router"]
