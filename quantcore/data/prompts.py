"""Prompts that chat models answer to be measured, and what a right answer to each must be. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantcore.data.builtin_text import read_prompts


@dataclass(frozen=True)
class ChatPrompt:
    """A chat whose next answer is asked for, and its ``kind``: chat, maths, code, json, languages, turns, tools.

    ``tools`` are those that may be called, as chat templates take them. ``schema`` is the JSON Schema of the answer,
    ``answer`` the right final one.
    """

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    schema: Mapping[str, Any] | None = None
    answer: str | None = None

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The names of the tools; a tool is ``{"type": "function", "function": {...}}``, or the function alone."""
        functions = [tool.get("function", tool) for tool in self.tools or ()]
        return tuple(str(function["name"]) for function in functions)


def packaged_prompts(num: int) -> list[ChatPrompt]:
    """Return the first ``num`` packaged prompts, which no calibration sees. The first of them are of all kinds."""
    return [ChatPrompt(**row) for row in read_prompts()[:num]]
