"""Writes the reference pages that come from the code: ``python -m docs.generate [FOLDER]``; `make docs` runs it.

The HTTP API comes from the OpenAPI document, the commands from their parsers, the fields from the JSON Schema of a
config, and the error codes from every call in the source that names one.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
from typer.main import get_command

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PACKAGES = ("api", "bitfoundry", "quantcore", "worker")
NOTE = "This page is generated from the code by `docs/generate.py`."


def cell(text: object) -> str:
    """Return the text on one line, escaped for a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table, or '' if there are no rows."""
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines)


# HTTP


def type_of(schema: dict[str, Any]) -> str:
    """Return a short name of a JSON Schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{schema['const']!r}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(type_of(option) for option in schema[key]))
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def limits_of(schema: dict[str, Any]) -> str:
    """Return the description and the default of a field."""
    default = f"Default: `{schema['default']!r}`." if schema.get("default") is not None else ""
    return f"{schema.get('description', '')} {default}".strip()


def fields_of(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        (f"`{name}`" + (" (required)" if name in required else ""), type_of(field), limits_of(field))
        for name, field in schema.get("properties", {}).items()
    ]
    return table(("field", "type", "meaning"), rows)


def definitions(schemas: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a section for each named schema."""
    for name, schema in sorted(schemas.items()):
        yield f"### {name}"
        yield prose(schema.get("description", ""))
        yield fields_of(schema) if schema.get("properties") else f"One of: {type_of(schema)}."


def prose(docstring: str) -> str:
    """Return a docstring with its code marks as Markdown has them."""
    return docstring.replace("``", "`").replace("<", "&lt;").strip()


def http_api() -> str:
    from api.openapi import app_of_nothing

    document = app_of_nothing().openapi()
    by_tag = defaultdict(list)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag[operation.get("tags", ["other"])[0]].append((method.upper(), path, operation))
    parts = [
        "# HTTP API",
        "`GET /openapi.json` serves the same description for programs. Every route but the open ones needs the header "
        "`Authorization: Bearer bf_...`. Errors are `application/problem+json` (RFC 9457) with a stable "
        f"[code](error-codes.md). {NOTE}",
    ]
    for tag, operations in sorted(by_tag.items()):
        parts.append(f"## {tag.capitalize()}")
        for method, path, operation in operations:
            parts.append(f"### {method} {path}")
            parts.append(f"{operation.get('summary', '')}. {prose(operation.get('description', ''))}".strip())
            rows = [
                (f"`{item['name']}`", item["in"], type_of(item.get("schema", {})), limits_of(item | item["schema"]))
                for item in operation.get("parameters", [])
            ]
            parts.append(table(("parameter", "in", "type", "meaning"), rows))
            for content in operation.get("requestBody", {}).get("content", {}).values():
                parts.append(f"Body: {type_of(content['schema'])}")
            rows = [
                (f"`{status}`", prose(answer.get("description", "")), answer_type(answer))
                for status, answer in operation["responses"].items()
            ]
            parts.append(table(("status", "when", "body"), rows))
    parts += ["## Schemas", *definitions(document["components"]["schemas"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def answer_type(answer: dict[str, Any]) -> str:
    for kind, content in answer.get("content", {}).items():
        return "a problem" if "problem" in kind else type_of(content.get("schema", {}))
    return ""


# Commands


class _Captured(Exception):
    """Carries a parser that was about to read its arguments."""


def own_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command that reads its own flags."""
    from bitfoundry.commands import submission
    from quantcore.cli.grammar import Flags
    from quantcore.cli.main import main

    def capture(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Captured(parser)

    with patch.object(Flags, "parse_args", capture):
        try:
            if command in submission.COMMANDS:
                submission.COMMANDS[command]([])
            else:
                main([command])
        except _Captured as captured:
            parser: argparse.ArgumentParser = captured.args[0]
            return parser
    raise AssertionError(f"{command} has no parser")


def own_command(command: str) -> Iterator[str]:
    parser = own_parser(command)
    yield prose(parser.description or "")
    rows = []
    for action in parser._actions:
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        rows.append((names + (" (required)" if action.required and action.option_strings else ""), text))
    yield table(("option", "meaning"), rows)


WITH_OWN_FLAGS = ("submit", "plan", "clone", "quantize", "auto", "mix", "convert", "imatrix", "conversations",
                  "evaluate", "speed", "compare", "chat", "selftest")  # fmt: skip


def service_command(path: str, command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group) or hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from service_command(f"{path} {name}", child)
        return
    yield f"## {path}"
    if path.removeprefix("bitfoundry ") in WITH_OWN_FLAGS:
        yield from own_command(path.removeprefix("bitfoundry "))
        return
    yield prose((command.help or "").replace("\n\n", "\n"))
    rows = []
    for option in command.params:
        names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
        is_argument = option.param_type_name == "argument"
        shown = f"`{(option.name or '').upper()}`" if is_argument else names
        rows.append((shown + (" (required)" if option.required else ""), getattr(option, "help", None) or ""))
    yield table(("option", "meaning"), rows)


def cli() -> str:
    from bitfoundry.commands.main import app

    root = get_command(app)
    parts = [
        "# Commands",
        "`bitfoundry COMMAND --help` shows the same in a terminal. [The command line](../how-to/command-line.md) says "
        f"how the commands find the service and what their exit status means. {NOTE}",
        *service_command("bitfoundry", root),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# Fields


def config_fields() -> str:
    from quantcore.config.quantization import json_schema

    schema = json_schema()
    parts = [
        "# Fields of a config",
        f"[The config](config.md) explains how these fields work together. {NOTE}",
        "## Config",
        prose(schema.get("description", "")),
        fields_of(schema),
        "## Parts",
        *definitions(schema["$defs"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# Errors


@dataclass(frozen=True)
class Site:
    """A place in the source that makes an error with a code."""

    code: str
    message: str
    hint: str
    kind: str
    status: str
    file: str


def text_of(node: ast.expr | None) -> str:
    """Return the text that an expression makes, with names for inserted values; '' for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"  # type: ignore[attr-defined]
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return text_of(node.body) or text_of(node.orelse)
    return ""


def codes_of(node: ast.expr, constants: dict[str, str]) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return codes_of(node.body, constants) + codes_of(node.orelse, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return [constants[node.id]]
    return []


STATUS = {"ProofError": "500"}
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+|unauthorized|forbidden|busy")
CODE_SECOND = {"Problem": 1, "_unavailable": 0}
"""Functions that take the code by position, with the index of that argument."""


@cache
def sites() -> list[Site]:
    """Return every call in the source that names an error code, in order of the files."""
    trees = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            trees[str(path.relative_to(ROOT))] = ast.parse(path.read_text("utf-8"))
    constants = {
        node.targets[0].id: node.value.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    return [site for file, tree in trees.items() for site in _sites_of(file, tree, constants)]


def _sites_of(file: str, tree: ast.Module, constants: dict[str, str]) -> Iterator[Site]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code":
                    for code in codes_of(line.value, constants):
                        yield Site(code, ast.get_docstring(node) or "", "", node.name, "", file)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        place = CODE_SECOND.get(name)
        if "code" in keywords:
            value, message = keywords["code"], node.args[0] if node.args else None
        elif place is not None and len(node.args) > place + 1:
            value, message = node.args[place], node.args[place + 1]
        else:
            continue
        status = text_status(name, node, keywords)
        for code in codes_of(value, constants):
            if SNAKE.fullmatch(code):
                yield Site(code, text_of(message), text_of(keywords.get("hint")), name, status, file)


def text_status(name: str, node: ast.Call, keywords: dict[str, ast.expr]) -> str:
    """Return the HTTP status of a request that meets the error; '' for errors of commands."""
    if name == "Problem":
        return ast.unparse(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""
    if name == "_unavailable" or ast.unparse(keywords.get("retryable", ast.Constant(False))) == "True":
        return "503"
    return STATUS.get(name, "422" if name.endswith(("Error", "unknown_value", "error")) else "")


def error_codes() -> str:
    by_code = defaultdict(list)
    for site in sites():
        by_code[site.code].append(site)
    parts = [
        "# Error codes",
        "A code never changes; match on it and not on the texts. The same codes appear in HTTP problems, in "
        "`error.code` of a job, and in the `--json` output of a command. The status is that of a request that meets "
        "the error; a job that meets it while it runs ends as `failed` (or waits in `retry_wait`, where a retry can "
        "help: 503). In "
        f"a cause, `{{...}}` stands for a value. {NOTE}",
        f"There are {len(by_code)} codes.",
    ]
    for code, code_sites in sorted(by_code.items()):
        statuses = sorted({site.status for site in code_sites if site.status})
        parts.append(f"## {code}")
        parts.append(f"Status {' or '.join(statuses)}." if statuses else "Without an HTTP status.")
        causes = dict.fromkeys((site.message, site.hint) for site in code_sites if site.message or site.hint)
        rows = [(code_text(message), code_text(hint)) for message, hint in causes]
        parts.append(table(("cause", "remedy"), rows))
        files = dict.fromkeys(site.file for site in code_sites)
        parts.append("Raised in " + ", ".join(f"`{file}`" for file in files) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


def code_text(text: str) -> str:
    """Return text with its placeholders as code, so that Markdown leaves them alone."""
    return re.sub(r"(?<!`)\{([^{}`]*)\}(?!`)", r"`{\1}`", text)


PAGES = {"http-api": http_api, "cli": cli, "config-fields": config_fields, "error-codes": error_codes}


def write(folder: Path) -> None:
    for name, page in PAGES.items():
        (folder / f"{name}.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE)
