"""Data files as they come and as they should not: every format, packed or not, and each fault by its code and line."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quantcore.config.texts import TextPart
from quantcore.data import files
from quantcore.data.documents import read_documents
from quantcore.data.files import format_of, read_rows
from quantcore.errors import CalibrationError

ROWS = [{"text": f'row {number}, «quoted» "so"\nand on', "n": number} for number in range(700)]


def jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n", "utf-8")


def csv(path: Path) -> None:
    lines = ['"{}",{}'.format(row["text"].replace('"', '""'), row["n"]) for row in ROWS]  # type: ignore[attr-defined]
    path.write_text("\ufefftext,n\n" + "\n".join(lines), "utf-8")


def parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=50)


WRITERS: dict[str, Callable[[Path], object]] = {
    "jsonl": jsonl,
    "json": lambda path: path.write_text(json.dumps(ROWS, indent=2), "utf-8"),
    "csv": csv,
    "parquet": parquet,
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_texts(tmp_path: Path, name: str, packed: bool) -> None:
    file = tmp_path / f"rows.{name}"
    WRITERS[name](file)
    if packed:
        file = tmp_path / f"rows.{name}.gz"
        file.write_bytes(gzip.compress((tmp_path / f"rows.{name}").read_bytes()))
    assert list(read_documents(TextPart(source=str(file)))) == [row["text"] for row in ROWS]


def test_json_rows_one_after_the_other_are_rows_too(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(" " + "\n".join(json.dumps(row) for row in ROWS))
    assert [row.values for row in read_rows(file)] == ROWS


def test_a_text_comes_in_pieces_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TEXT_CHUNK_BYTES", 100)
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    pieces = [row.values["text"] for row in read_rows(tmp_path / "a.txt")]
    assert "".join(pieces) == text and len(pieces) > 5
    assert all(len(piece) <= 100 and piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.jsonl.zst", "a.pkl", "a.py", "jsonl", ".gz", "a"])
def test_other_kinds_of_files_are_refused(name: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        format_of(name)
    assert caught.value.code == "unsupported_format" and ".parquet" in caught.value.hint


GOOD = b'{"text": "a"}\n'
BAD: dict[str, tuple[str, bytes, str, str]] = {
    "empty": ("a.jsonl", b"", "empty_dataset", "no rows"),
    "only blank lines": ("a.jsonl", b"\n \n", "empty_dataset", "no rows"),
    "only a header": ("a.csv", b"text,n\n", "empty_dataset", "no rows"),
    "an empty array": ("a.json", b"[]", "empty_dataset", "no rows"),
    "not UTF-8": ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "bad_encoding", "Line 2"),
    "a text not UTF-8": ("a.txt", b"good\ncaf\xe9\n", "bad_encoding", "Line 2 is not UTF-8 text (its byte 3)"),
    "an array not UTF-8": ("a.json", b'[{"text": "\xff"}]', "bad_encoding", "UTF-8"),
    "no JSON": ("a.jsonl", GOOD + b"{oops}\n", "bad_row", "Line 2"),
    "no JSON in an array": ("a.json", b'[{"text": "a"}, oops]', "bad_row", "Row 2"),
    "an array that ends early": ("a.json", b'[{"text": "a"}, {"text": "b', "bad_row", "Row 2"),
    "an abyss of brackets": ("a.jsonl", GOOD + b'{"text": ' + b"[" * 200_000 + b"\n", "bad_row", "Line 2"),
    "an abyss in an array": ("a.json", b'[{"text": ' + b"[" * 200_000, "bad_row", "Row 1"),
    "an array in an array": ("a.json", b'[[{"text": "a"}]]', "no_text_column", "Row 1"),
    "a number": ("a.jsonl", b"3\n", "no_text_column", "Line 1"),
    "fields without a column": ("a.csv", b"text,n\na,1\nb,2,3\n", "bad_row", "Line 3 has 3 fields"),
    "a column twice": ("a.csv", b"text,text\na,b\n", "bad_row", "text, text"),
    "a quote that stays open": ("a.csv", b'text\n"a\nb\n', "bad_row", "Line 3"),
    "no gzip": ("a.jsonl.gz", GOOD, "bad_archive", "unpacked"),
    "gzip cut short": ("a.jsonl.gz", gzip.compress(GOOD * 100)[:-9], "bad_archive", "unpacked"),
    "gzip in gzip": ("a.jsonl.gz", gzip.compress(gzip.compress(GOOD)), "bad_encoding", "Line 1"),
    "no Parquet": ("a.parquet", GOOD * 100, "bad_row", "Parquet"),
    "half a surrogate pair": ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', "bad_row", "Line 2"),
    "text that is a list": ("a.jsonl", b'{"text": [["a"]]}\n', "no_text_column", "of type list"),
    "a column that is missing in one row": ("a.jsonl", GOOD + b'{"body": "b", "id": 3}\n', "no_text_column",
                                            "Line 2 has no column 'text'; it has: body, id"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_explained(tmp_path: Path, case: str) -> None:
    name, content, code, words = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError) as caught:
        list(read_documents(TextPart(source=str(tmp_path / name))))
    assert caught.value.code == code and words in caught.value.message


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.json"])
def test_a_row_that_does_not_end_is_refused_before_it_is_all_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1 << 20)
    start = {"a.json": b'[{"text": "', "a.jsonl": b'{"text": "', "a.csv": b'text\n"', "a.txt": b""}[name]
    file = tmp_path / name
    file.write_bytes(start + b"a" * (40 << 20))
    tracemalloc.start()
    with pytest.raises(CalibrationError) as caught:
        list(read_rows(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.code == "row_too_large" and peak < 20 << 20


def test_a_bomb_is_seen_while_it_goes_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RATIO_COUNTS_FROM_BYTES", 1 << 20)
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(GOOD * 500_000))
    num_rows = 0
    with pytest.raises(CalibrationError, match="more than the allowed 1 MiB") as caught:
        for _ in read_rows(bomb):
            num_rows += 1
    assert caught.value.code == "archive_too_large" and 50_000 < num_rows < 125_000
    monkeypatch.setattr(files, "MAX_RATIO", 10_000)
    assert sum(1 for _ in read_rows(bomb)) == 500_000
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(CalibrationError, match="more than the allowed 1 MiB"):
        list(read_rows(bomb))


def test_parquet_that_says_it_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(tmp_path / "a.parquet")
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(CalibrationError) as caught:
        next(read_rows(tmp_path / "a.parquet"))
    assert caught.value.code == "archive_too_large"


def test_the_column_is_chosen_or_given(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "body": "b"}\n{"text": null, "body": "c"}\n{"text": " ", "body": "d"}\n')
    assert list(read_documents(TextPart(source=str(file)))) == ["a", "", ""]
    assert list(read_documents(TextPart(source=str(file), column="body"))) == ["b", "c", "d"]
    with pytest.raises(CalibrationError) as caught:
        list(read_documents(TextPart(source=str(file), column="bodi")))
    assert (caught.value.code, caught.value.allowed) == ("no_text_column", ("text", "body"))
    assert caught.value.field == "/calibration/column"


def parquet_of(path: Path, table: Any, **options: Any) -> Path:
    pq.write_table(table, path, compression="zstd", store_schema=False, **options)
    return path


def test_parquet_that_unfolds_to_much_is_stopped_while_it_does(tmp_path: Path) -> None:
    """One text in a dictionary that many rows name: the file's own numbers count it once."""
    dictionary = pa.array(["a " * (1 << 19)])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), dictionary)
    bomb = parquet_of(tmp_path / "bomb.parquet", pa.table({"text": column}))
    assert pq.ParquetFile(bomb).metadata.row_group(0).total_byte_size < 2 << 20 and bomb.stat().st_size < 10_000
    with pytest.raises(CalibrationError, match="64 MiB") as caught:
        list(read_rows(bomb))
    assert caught.value.code == "archive_too_large"


def test_a_row_of_parquet_has_a_limit_too(tmp_path: Path) -> None:
    table = pa.table({"text": ["short", "a" * (files.MAX_ROW_BYTES + 1), "short"]})
    with pytest.raises(CalibrationError, match="Row 2 is longer than 16 MiB") as caught:
        list(read_rows(parquet_of(tmp_path / "long.parquet", table)))
    assert caught.value.code == "row_too_large"


def test_parquet_within_the_limits_is_read_whole(tmp_path: Path) -> None:
    rows = [{"text": f"row {n} " * (n % 50), "tags": [{"a": n}]} for n in range(1000)]
    path = parquet_of(tmp_path / "good.parquet", pa.Table.from_pylist(rows), row_group_size=300)
    assert [row.values for row in read_rows(path)] == rows
