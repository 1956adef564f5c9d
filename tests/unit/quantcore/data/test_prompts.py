"""Files with prompts: what they may hold, and that a wrong one is refused with its line and the reason."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from quantcore.config.job_spec import MAX_ANSWERS
from quantcore.config.task import MAX_OWN_PROMPTS
from quantcore.data.json_schema import fault_of_schema
from quantcore.data.prompts import packaged_prompts, read_prompt_set, read_prompts_file
from quantcore.errors import ConfigError

ASK = [{"role": "user", "content": "How much is 6 times 7?"}]
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}


def written(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", "utf-8")
    return path


def test_all_fields_are_read_and_kinds_follow_from_them(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "multiply", "arguments": "{}"}}]}
    file = written(
        tmp_path / "own.jsonl",
        {"messages": ASK},
        {"messages": ASK, "answer": 42},
        {"messages": ASK, "schema": {"type": "object"}},
        {"messages": [*ASK, call, {"role": "tool", "content": "42"}], "tools": [TOOL, {"name": "add"}]},
        {"messages": ASK, "answer": "forty-two", "kind": "words"},
    )
    read = read_prompts_file(file)
    assert read.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [prompt.kind for prompt in read.prompts] == ["chat", "maths", "json", "tools", "words"]
    assert [prompt.answer for prompt in read.prompts] == [None, "42", None, None, "forty-two"]
    assert read.prompts[2].schema == {"type": "object"} and read.prompts[3].tool_names == ("multiply", "add")
    assert read_prompt_set(file, 2).prompts == read.prompts[:2]
    packed = tmp_path / "own.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert read_prompts_file(packed).prompts == read.prompts


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([], "line 2 has no columns"),
        ({}, "line 2: 'messages' is not a list with a message or more"),
        ({"messages": []}, "line 2: 'messages' is not a list"),
        ({"prompt": "Hello"}, "there is no field 'prompt'; allowed are messages, tools, schema, answer, kind"),
        ({"messages": [{"role": "human", "content": "a"}]}, "message 1 has none of the roles system"),
        ({"messages": [*ASK, {"role": "user"}]}, "the content of message 2 is not a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1 is not a text"),
        ({"messages": [*ASK, {"role": "assistant", "content": "42"}]}, "there is nothing to answer"),
        ({"messages": ASK, "tools": []}, "'tools' is not a list of tools with a name"),
        ({"messages": ASK, "tools": [{"type": "function"}]}, "'tools' is not a list of tools"),
        ({"messages": ASK, "schema": {"type": "text"}}, "schema.type: 'text' is not valid"),
        ({"messages": ASK, "answer": ["42"]}, "'answer' is neither a text nor a number"),
        ({"messages": ASK, "kind": "My kind"}, "'kind' is not a word"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number_and_the_reason(row: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_prompts_file(written(tmp_path / "own.jsonl", {"messages": ASK}, row))
    assert caught.value.code == "invalid_prompts" and "'own.jsonl' is not a file of prompts: " in caught.value.message
    assert why.lower() in caught.value.message.lower() and "line 2" in caught.value.message.lower()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("own.jsonl", b'{"messages": \n', "Line 1 is not valid JSON"),
        ("own.jsonl", b"", "The file has no rows"),
        ("own.jsonl", b"\xff\xfe\n", "Line 1 is not UTF-8"),
        ("own.txt", b"Hello", "its name does not end in .jsonl"),
        ("own.exe", b"", "is not a supported type"),
        ("own.jsonl.gz", b"no gzip", "cannot be unpacked"),
    ],
)
def test_a_file_that_is_none_is_refused(name: str, content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=why) as caught:
        read_prompts_file(tmp_path / name)
    assert caught.value.code == "invalid_prompts"


def test_a_missing_file_and_too_many_prompts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file") as caught:
        read_prompts_file(tmp_path / "none.jsonl")
    assert caught.value.code == "file_not_found"
    with pytest.raises(ConfigError, match="1001 prompts, and 1000 are allowed"):
        read_prompts_file(written(tmp_path / "own.jsonl", *[{"messages": ASK}] * (MAX_OWN_PROMPTS + 1)))


def test_the_packaged_prompts_are_as_strict(tmp_path: Path) -> None:
    """They pass the same checks; those that ask for JSON have a schema, and most of maths an answer."""
    every = packaged_prompts(MAX_ANSWERS)
    names = ("messages", "tools", "schema", "answer", "kind")
    rows = [{name: value for name in names if (value := getattr(prompt, name)) is not None} for prompt in every]
    assert read_prompts_file(written(tmp_path / "own.jsonl", *rows)).prompts == tuple(every)
    assert all(
        prompt.schema is not None and fault_of_schema(prompt.schema) is None
        for prompt in every
        if prompt.kind == "json"
    )
    assert sum(prompt.answer is not None for prompt in every) == 5
