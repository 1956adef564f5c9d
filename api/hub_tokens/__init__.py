"""Tokens for the Hugging Face Hub over HTTP: written and used by name, never read."""

from api.hub_tokens.endpoints import router

__all__ = ["router"]
