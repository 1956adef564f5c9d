"""Prompts that chat models answer to be measured, and what a right answer to each must be. No torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.config.task import MAX_OWN_PROMPTS
from quantcore.data.builtin_text import read_prompts
from quantcore.data.files import Row, format_of, read_rows
from quantcore.data.json_schema import fault_of_schema
from quantcore.errors import CalibrationError, ConfigError
from quantcore.sandbox.opening import open_named

FIELDS = ("messages", "tools", "schema", "answer", "kind")
ROLES = ("system", "developer", "user", "assistant", "tool")
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,39}")


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


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and the SHA-256 of the file that they come from; None for the packaged ones."""

    prompts: tuple[ChatPrompt, ...]
    sha256: str | None = None


def read_prompt_set(file: Path | None, num: int) -> PromptSet:
    """Return the first ``num`` prompts of a file, or of the packaged ones. Raises as ``read_prompts_file``."""
    if file is None:
        return PromptSet(tuple(packaged_prompts(num)))
    whole = read_prompts_file(file)
    return PromptSet(whole.prompts[:num], whole.sha256)


def packaged_prompts(num: int) -> list[ChatPrompt]:
    """Return the first ``num`` packaged prompts, which no calibration sees. The first of them are of all kinds."""
    return [ChatPrompt(**row) for row in read_prompts()[:num]]


def read_prompts_file(path: Path) -> PromptSet:
    """Read the prompts in a file of JSON lines (docs/how-to/evaluate.md has the format).

    Raises ConfigError: ``file_not_found``, and ``invalid_prompts`` with the number of the line and the reason.
    """
    try:
        if format_of(path.name) != "jsonl":
            raise _invalid(path, "its name does not end in .jsonl")
        rows = list(read_rows(path))
        with open_named(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(
            f"There is no file '{path}' with prompts, or it cannot be read: {error.strerror}.",
            code="file_not_found",
            hint="Give the path of a .jsonl file.",
        ) from error
    except CalibrationError as error:
        raise _invalid(path, error.message.removesuffix(".")) from error
    if len(rows) > MAX_OWN_PROMPTS:
        raise _invalid(path, f"it has {len(rows)} prompts, and {MAX_OWN_PROMPTS} are allowed")
    return PromptSet(tuple(_prompt_of(row, path) for row in rows), digest)


def _prompt_of(row: Row, path: Path) -> ChatPrompt:
    values = row.values
    if fault := _fault_of(values):
        raise _invalid(path, f"{row.place[0].lower()}{row.place[1:]}: {fault}")
    answer = values.get("answer")
    usual = "json" if "schema" in values else "tools" if "tools" in values else "chat" if answer is None else "maths"
    return ChatPrompt(
        values.get("kind", usual),
        values["messages"],
        values.get("tools"),
        values.get("schema"),
        None if answer is None else str(answer),
    )


def _fault_of(values: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a prompt, in a few words; or None."""
    if unknown := sorted(values.keys() - {*FIELDS}):
        return f"there is no field '{unknown[0][:50]}'; allowed are {', '.join(FIELDS)}"
    messages, tools, answer = values.get("messages"), values.get("tools"), values.get("answer")
    if not isinstance(messages, list) or not messages:
        return "'messages' is not a list with a message or more"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"message {number} has none of the roles {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str) and not (
            message.get("content") is None and isinstance(message.get("tool_calls"), list)
        ):
            return f"the content of message {number} is not a text"
    if messages[-1]["role"] == "assistant":
        return "the last message is one of the assistant, so there is nothing to answer"
    if "tools" in values and not (isinstance(tools, list) and tools and all(map(_is_tool, tools))):
        return '\'tools\' is not a list of tools with a name, such as {"type": "function", "function": {"name": ...}}'
    if "schema" in values and (fault := fault_of_schema(values["schema"])):
        return fault
    if "answer" in values and (isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == ""):
        return "'answer' is neither a text nor a number"
    if "kind" in values and not (isinstance(values["kind"], str) and _KIND.fullmatch(values["kind"])):
        return "'kind' is not a word such as chat, maths, code or json"
    return None


def _is_tool(tool: object) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _invalid(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"'{path.name}' is not a file of prompts: {why}.",
        code="invalid_prompts",
        hint='Each line is an object such as {"messages": [{"role": "user", "content": "..."}]}. '
        "docs/how-to/evaluate.md has the other fields.",
    )
