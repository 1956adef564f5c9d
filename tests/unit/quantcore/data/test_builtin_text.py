"""The built-in text is what its README says, in every kind, and dialogues are what the model would see."""

import hashlib
import json
import re
from importlib.resources import files

import pytest

from quantcore.config.texts import CalibrationConfig
from quantcore.data.builtin_text import KINDS, read_builtin, read_kind
from quantcore.engine.data.windows import DocumentTokenizer, token_windows
from quantcore.errors import CalibrationError

FOLDER = files("quantcore.data") / "builtin"
SHA256 = {
    "prose": "b9afb3140496588c87b7f233d64e55bb924d924c749706471acd7c0e8d822e67",
    "dialogue": "88cfb8dc2e59e69e1e0ecbd7d0c3da0a13698c8e05d25378d5a7ce88fa0bfec5",
    "code": "56edc840b860c1d8517310899ab391803dcb3d3c2607cf7cc4426c54b5dbc7d7",
    "languages": "37392b2e15506aabb9ded52c372e320e4039b31f55a538ba43ba89faee5780d1",
}
"""Pinned: another text changes what every default job calibrates on and is measured on."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_what_it_was(kind: str) -> None:
    content = (FOLDER / f"{kind}.jsonl").read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256[kind]
    assert 50_000 < len(content) < 150_000
    texts = read_kind(kind)
    assert len(texts) >= 24 and len(set(texts)) == len(texts) and min(map(len, texts)) > 40


def test_the_readme_names_every_source_with_a_licence_that_allows_it() -> None:
    readme = (FOLDER / "README.md").read_text("utf-8")
    rows = [line.strip("| \n").split(" | ") for line in readme.splitlines() if line.startswith("|")][2:]
    assert {re.split(r"[;(]", row[-1])[0].strip() for row in rows} == {"public domain", "CC0-1.0", "Apache-2.0"}
    for kind in KINDS:
        assert f"| `{kind}.jsonl` |" in readme
        for line in (FOLDER / f"{kind}.jsonl").read_text("utf-8").splitlines():
            assert json.loads(line).get("from", "") in readme


def test_dialogues_go_through_the_template_or_become_plain_text() -> None:
    rendered = read_kind("dialogue", lambda messages: f"<{messages[0]['content']}>")
    assert rendered[0] == "<What is the difference between weather and climate? I always mix them up.>"
    plain = read_kind("dialogue")
    assert plain[0].startswith("User: What is the difference") and "\n\nAssistant: Weather is" in plain[0]

    def refuse(messages: object) -> str:
        raise CalibrationError("no template", code="no_chat_template")

    assert read_kind("dialogue", refuse) == plain


def test_roles_alternate_so_that_every_template_takes_them() -> None:
    for line in (FOLDER / "dialogue.jsonl").read_text("utf-8").splitlines():
        roles = [message["role"] for message in json.loads(line)["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles


def tokenize(text: str) -> list[int]:
    return [ord(character) for character in text]


def kind_of(window: list[int]) -> str:
    """The kind whose text a window is from. It may hold the borders of rows, but not in each of its pieces."""
    pieces = ["".join(map(chr, window[at : at + 40])) for at in range(0, len(window), 40)]
    return next(kind for kind in KINDS for row in read_kind(kind) if any(piece in row for piece in pieces[:-1]))


def test_both_parts_hold_every_kind_in_its_proportion_and_share_nothing() -> None:
    found = token_windows(
        CalibrationConfig(num_samples=32, seq_len=512), DocumentTokenizer(tokenize), num_held_out=12, held_out_len=512
    )
    sizes = {kind: sum(map(len, read_kind(kind))) for kind in KINDS}
    for windows in (found.calibration_NT, found.held_out_NT):
        kinds = [kind_of(window) for window in windows.tolist()]
        for kind in KINDS:
            assert abs(kinds.count(kind) - len(kinds) * sizes[kind] / sum(sizes.values())) <= 2, kind
        assert len(set(kinds[: len(kinds) // 2])) >= 3  # they alternate
    assert found.held_out_strata_N is not None
    numbers = zip(found.held_out_strata_N.tolist(), map(kind_of, found.held_out_NT.tolist()), strict=True)
    assert set(numbers) == set(enumerate(KINDS))
    every_fourth = {text for kind in KINDS for text in read_kind(kind)[3::4]}
    held_out = "".join(every_fourth)
    for window in found.held_out_NT.tolist():
        assert any("".join(map(chr, window[at : at + 40])) in held_out for at in (0, 100))
    for window in found.calibration_NT.tolist():
        assert "".join(map(chr, window[:256])) not in held_out


def test_the_kinds_take_turns_when_it_is_read_in_order() -> None:
    texts = list(read_builtin())
    assert sorted(texts) == sorted(text for kind in KINDS for text in read_kind(kind))
    first = texts[: len(texts) // 4]
    assert all(any(text in first for text in read_kind(kind)) for kind in KINDS)
