"""Text to windows: disjoint parts, seeds, every kind of source, every bad source."""

import json

import pytest
import torch

from quantcore.calibration.text import read_documents, token_windows
from quantcore.config import CalibrationConfig
from quantcore.errors import CalibrationError


def tokenize(text):
    """One token a character: windows can be read."""
    return [ord(character) for character in text]


def windows(source, num_samples=3, seq_len=8, seed=0, num_held_out=2, held_out_len=8, separator=None):
    calibration = CalibrationConfig(source=str(source), num_samples=num_samples, seq_len=seq_len, seed=seed)
    return token_windows(
        calibration, tokenize, num_held_out=num_held_out, held_out_len=held_out_len, separator=separator
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
        list(read_documents(str(file)))
    assert caught.value.code == code and words in caught.value.message


def test_a_file_that_is_not_utf8_is_said(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(CalibrationError, match="byte 3"):
        list(read_documents(str(file)))


@pytest.mark.parametrize("source", ["/nowhere/at/all.txt", "./nowhere.jsonl", "a/b/c"])
def test_a_missing_file_is_said(source):
    with pytest.raises(CalibrationError) as caught:
        list(read_documents(source))
    assert caught.value.code == "calibration_not_found"


def test_a_hub_name_without_the_library_or_the_network_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CalibrationError) as caught:
        list(read_documents("pileval"))
    assert caught.value.code in ("datasets_not_installed", "dataset_unreachable")
    assert caught.value.hint
