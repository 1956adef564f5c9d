"""Text to windows: disjoint parts, seeds, every kind of source, every bad source."""

import json

import pytest
import torch

from quantcore.config.texts import CalibrationConfig, TextPart
from quantcore.data.documents import read_documents
from quantcore.engine.data.windows import DocumentTokenizer, token_windows
from quantcore.errors import CalibrationError


def tokenize(text):
    """One token a character: windows can be read."""
    return [ord(character) for character in text]


def windows(source, num_samples=3, seq_len=8, seed=0, num_held_out=2, held_out_len=8, separator=None):
    calibration = CalibrationConfig(source=str(source), num_samples=num_samples, seq_len=seq_len, seed=seed)
    return token_windows(
        calibration,
        DocumentTokenizer(tokenize, separator=separator),
        num_held_out=num_held_out,
        held_out_len=held_out_len,
    )


@pytest.fixture
def numbered(tmp_path):
    """A text whose every character is different, so that overlap can be seen."""
    file = tmp_path / "numbered.txt"
    file.write_text("".join(chr(0x4E00 + i) for i in range(400)), "utf-8")
    return file


def test_calibration_and_held_out_windows_share_no_token(numbered):
    found = windows(numbered, num_samples=4)
    calibration, held_out = set(found.calibration_NT.flatten().tolist()), set(found.held_out_NT.flatten().tolist())
    assert found.calibration_NT.shape == (4, 8) and found.held_out_NT.shape == (2, 8)
    assert len(calibration) == 32 and len(held_out) == 16 and not calibration & held_out


def test_the_seed_chooses_the_windows_and_only_them(numbered):
    first, again, other = windows(numbered), windows(numbered), windows(numbered, seed=1)
    assert torch.equal(first.calibration_NT, again.calibration_NT)
    assert not torch.equal(first.calibration_NT, other.calibration_NT)
    assert torch.equal(first.held_out_NT, other.held_out_NT)


def test_documents_are_joined_by_the_separator(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": "ab", "id": i}) for i in range(40)) + "\n\n")
    stream = windows(file, num_samples=1, seq_len=9, num_held_out=1, separator=0).calibration_NT.flatten().tolist()
    assert stream == [97, 98, 0] * 3


@pytest.fixture
def rows(tmp_path):
    """4,000 rows of 8 tokens, each of one character that no other row has."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": 8 * chr(0x4E00 + i)}) + "\n" for i in range(4000)))
    return file


def test_rows_are_drawn_with_the_seed_and_divided_without_it(rows):
    found = [windows(rows, num_samples=50, seed=seed, num_held_out=20) for seed in (0, 0, 1)]
    drawn = [one.calibration_NT[:, 0].tolist() for one in found]
    assert drawn[0] == drawn[1] and set(drawn[0]) != set(drawn[2]) and len(set(drawn[0])) == 50
    held_out = [set(one.held_out_NT.flatten().tolist()) for one in found]
    assert held_out[0] == held_out[1] == held_out[2] == {0x4E00 + 4 * at + 3 for at in range(20)}
    assert not held_out[0] & set(found[0].calibration_NT.flatten().tolist())
    assert max(drawn[0]) - 0x4E00 > 900  # from all over the first thousand rows, not the first ones


def test_the_draw_is_the_same_on_every_machine(rows):
    """Pinned: a change of the order changes every artifact that is made from rows."""
    drawn = windows(rows, num_samples=6).calibration_NT[:, 0]
    assert (drawn - 0x4E00).tolist() == [560, 538, 344, 1125, 1009, 681]


def test_a_long_source_is_not_read_to_its_end(rows, monkeypatch):
    read = []
    text_of = "quantcore.data.documents.text_of"
    monkeypatch.setattr(text_of, lambda row, *_: read.append(row) or row.values["text"])
    windows(rows, num_samples=5)
    assert 1000 < len(read) < 1500
    monkeypatch.setattr("quantcore.engine.data.windows.SHUFFLE_CHARS", 80)  # long rows: fewer of them wait
    read.clear()
    windows(rows, num_samples=5)
    assert len(read) < 60


def test_rows_that_do_not_suffice_are_all_used(rows):
    found = windows(rows, num_samples=3000, num_held_out=1000)
    assert len(set(found.calibration_NT[:, 0].tolist())) == 3000
    with pytest.raises(CalibrationError, match="gives 3000 calibration windows of 8 tokens and 2 held-out"):
        windows(rows, num_samples=3001)


def test_chats_are_rendered(tmp_path):
    file = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    file.write_text((json.dumps({"messages": chat}) + "\n") * 40)
    calibration = CalibrationConfig(source=str(file), num_samples=1, seq_len=8)
    found = token_windows(
        calibration,
        DocumentTokenizer(tokenize, render=lambda messages: "".join(f"<{one['content']}>" for one in messages)),
        num_held_out=1,
        held_out_len=8,
    )
    assert "".join(map(chr, found.calibration_NT[0].tolist())) == "<ab><cd>"
    with pytest.raises(CalibrationError) as caught:
        windows(file)
    assert caught.value.code == "no_chat_template" and "Line 1" in caught.value.message


@pytest.fixture
def two(tmp_path, rows):
    """A text of letters and rows of ideographs, as sources with shares of 3 to 1."""
    letters = tmp_path / "letters.txt"
    letters.write_text("abcdefgh" * 100)
    return [{"source": str(letters), "share": 3}, {"source": str(rows), "share": 1}]


def test_each_source_gives_its_share_of_both_parts(two, rows):
    calibration = CalibrationConfig(sources=two, num_samples=8, seq_len=8)
    found, again = (
        token_windows(calibration, DocumentTokenizer(tokenize), num_held_out=4, held_out_len=8) for _ in range(2)
    )
    assert torch.equal(found.calibration_NT, again.calibration_NT)
    is_row = found.calibration_NT[:, 0] >= 0x4E00
    assert is_row.tolist() == [False, False, True, False, False, False, True, False]
    assert (found.held_out_NT[:, 0] >= 0x4E00).tolist() == [False, False, True, False]
    alone = windows(rows, num_samples=2, num_held_out=1)  # what the source gives by itself
    assert torch.equal(found.calibration_NT[is_row], alone.calibration_NT)
    assert torch.equal(found.held_out_NT[found.held_out_NT[:, 0] >= 0x4E00], alone.held_out_NT)
    assert found.held_out_strata_N.tolist() == [0, 0, 1, 0]


def test_an_error_names_the_source_at_fault(two, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"body": "a"}\n')
    for fault, code, field in (
        ({"source": str(file)}, "no_text_column", "/calibration/sources/1/column"),
        ({"source": "/nowhere.txt"}, "calibration_not_found", "/calibration/sources/1/source"),
        ({"source": str(file), "column": "body"}, "not_enough_samples", "/calibration/num_samples"),
    ):
        calibration = CalibrationConfig(sources=[two[0], fault], num_samples=4, seq_len=8)
        with pytest.raises(CalibrationError) as caught:
            token_windows(calibration, DocumentTokenizer(tokenize), num_held_out=2, held_out_len=8)
        assert (caught.value.code, caught.value.field) == (code, field)
        assert caught.value.message.count(fault["source"]) == 1


def test_builtin_text_is_there_and_enough_for_the_demo():
    found = windows("builtin", num_samples=32, seq_len=512, num_held_out=8, held_out_len=512)
    assert found.calibration_NT.shape == (32, 512) and found.held_out_NT.shape == (8, 512)


def test_too_little_text_says_how_much_there_is(numbered):
    with pytest.raises(CalibrationError, match="gives 37 calibration windows of 8 tokens") as caught:
        windows(numbered, num_samples=38)
    assert caught.value.code == "not_enough_samples"


BAD_SOURCES = {
    "not JSON": (b'{"text": "a"}\n{oops}\n', "bad_row", "Line 2"),
    "no text field": (b'{"text": "a"}\n{"body": "b", "id": 3}\n', "no_text_column", "it has: body, id"),
    "not an object": (b"[1]\n", "no_text_column", "Line 1"),
    "text is a number": (b'{"text": 3}\n', "no_text_column", "Line 1"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_bad_row_is_named(tmp_path, case):
    content, code, words = BAD_SOURCES[case]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(CalibrationError) as caught:
        list(read_documents(TextPart(source=str(file))))
    assert caught.value.code == code and words in caught.value.message


def test_a_file_that_is_not_utf8_is_said(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(CalibrationError, match="byte 3"):
        list(read_documents(TextPart(source=str(file))))


@pytest.mark.parametrize("source", ["/nowhere/at/all.txt", "./nowhere.jsonl", "a/b/c"])
def test_a_missing_file_is_said(source):
    with pytest.raises(CalibrationError) as caught:
        list(read_documents(TextPart(source=source)))
    assert caught.value.code == "calibration_not_found"


def test_a_hub_name_without_the_network_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CalibrationError) as caught:
        list(read_documents(TextPart(source="pileval")))
    assert caught.value.code == "hub_unreachable"
    assert "HF_HUB_OFFLINE is set" in caught.value.message and caught.value.hint
