"""Parts of messages that are images or sounds."""

from typing import Any

import pytest

from quantcore.data.messages import Reference, holds_media, texts_of, without_references
from quantcore.errors import CalibrationError

TEXT = {"type": "text", "text": "What is it?"}
REFERENCES = {
    "a path": ({"type": "image", "image": "a.png"}, Reference("image", "a.png")),
    "a path by its name": ({"type": "image", "path": "a.png"}, Reference("image", "a.png")),
    "a url": ({"type": "image", "url": "data:image/png;base64,AA=="}, Reference("image", "data:image/png;base64,AA==")),
    "as OpenAI": ({"type": "image_url", "image_url": {"url": "data:,"}}, Reference("image", "data:,")),
    "bytes": ({"type": "image", "image": {"bytes": b"x", "path": "a.png"}}, Reference("image", b"x")),
    "sound": ({"type": "audio", "audio": "a.wav"}, Reference("audio", "a.wav")),
}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("name", REFERENCES)
def test_a_part_refers_to_a_file(name: str) -> None:
    part, reference = REFERENCES[name]
    messages, found = without_references(chat(part, TEXT), {})
    assert found == (reference,) and holds_media(chat(part))
    assert messages == chat({"type": reference.kind}, TEXT) and texts_of(messages) == chat(TEXT)


@pytest.mark.parametrize(
    "row",
    [{"images": ["a.png", "b.png"]}, {"images": [{"bytes": None, "path": "a.png"}, {"bytes": b"b", "path": None}]}],
)
def test_parts_without_a_file_take_the_next_of_the_column(row: dict[str, Any]) -> None:
    bare, own = {"type": "image"}, {"type": "image", "image": "own.png"}
    _, found = without_references(chat(bare, own, bare), row)
    second = "b.png" if row["images"][1] == "b.png" else b"b"
    assert [reference.source for reference in found] == ["a.png", "own.png", second]


def test_a_column_of_one_image() -> None:
    _, found = without_references(chat({"type": "image"}), {"image": "a.png", "images": None})
    assert found == (Reference("image", "a.png"),)


WRONG = {
    "none in the column": ([{"type": "image"}, {"type": "image"}], {"images": ["a.png"]}, "without a file"),
    "one too many": (
        [{"type": "image"}],
        {"images": ["a.png", "b.png"]},
        "1 in the column 'images' do not belong to a part",
    ),
    "video": ([{"type": "video", "video": "a.mp4"}], {}, "type 'video'"),
    "no part": ([TEXT, "text"], {}, "type 'str'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    parts, row, told = WRONG[name]
    with pytest.raises(CalibrationError, match=told) as caught:
        without_references(chat(*parts), row)
    assert caught.value.code == "bad_media" and caught.value.hint


def test_texts_hold_no_media() -> None:
    assert not holds_media(chat(TEXT)) and holds_media(chat({"type": "video"}))
    assert without_references(chat(TEXT), {"images": ["unused.png"]}) == (chat(TEXT), ())
