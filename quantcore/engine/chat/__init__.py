"""Answers prompts with a result and its original."""
