"""Datasets on the Hub as the engine reads them, against our stand-in of it (tests.support.hub_server)."""

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from huggingface_hub import constants

from quantcore.config.texts import TextPart
from quantcore.data import hub_dataset
from quantcore.data.documents import read_documents, read_documents_with_media
from quantcore.data.messages import Reference
from quantcore.errors import CalibrationError
from tests.support.hub_server import HubServer

CARD = b"""---
configs:
- config_name: first
  data_files: first/*.parquet
- config_name: second
  data_files: second/*.parquet
---
"""


def parquet(**columns: list[Any]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def texts(name: str, count: int = 3) -> list[str]:
    return [f"{name} {number}" for number in range(count)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        files = server.url + "/datasets/{repo_id}/resolve/{revision}/{path}"
        monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", files)
        yield server
        huggingface_hub.close_session()  # type: ignore[attr-defined]


def read(source: str = "org/set", **asked: Any) -> list[str]:
    return list(read_documents(TextPart(source=source, **asked)))


def fails(source: str = "org/set", **asked: Any) -> CalibrationError:
    with pytest.raises(CalibrationError) as caught:
        read(source, **asked)
    return caught.value


def test_the_train_split_is_read_and_its_text_column(server: HubServer) -> None:
    server.add("datasets/org/set", {"data/train-0.parquet": parquet(text=texts("train"), other=[1, 2, 3]),
                                    "data/test-0.parquet": parquet(text=texts("test"), other=[1, 2, 3])})  # fmt: skip
    assert read() == texts("train")
    assert read(split="test") == texts("test")
    error = fails(split="valid")
    assert (error.code, error.allowed, error.field) == ("unknown_split", ("train", "test"), "/calibration/split")
    error = fails(column="body")
    assert (error.code, error.allowed) == ("no_text_column", ("text", "other"))
    assert fails(column="other").code == "no_text_column"


def test_columns_that_are_not_asked_for_are_not_decoded(server: HubServer) -> None:
    """A picture that is none, as a dataset with pictures would hold it."""
    columns = b"  - name: text\n    dtype: string\n  - name: image\n    dtype: image\n"
    card = b"---\ndataset_info:\n  features:\n" + columns + b"---\n"
    data = parquet(text=["a"], image=[{"bytes": b"no picture", "path": None}])
    server.add("datasets/org/set", {"README.md": card, "train.parquet": data})
    assert read() == read(column="text") == ["a"]
    assert fails(column="image").code == "no_text_column"


def test_images_lie_in_a_column_of_their_own(server: HubServer) -> None:
    """As TRL's datasets have them: each part of the type image is the next of the column, whose files are not read."""
    part = b"    list:\n    - name: role\n      dtype: string\n    - name: content\n      list:\n"
    part += b"      - name: type\n        dtype: string\n      - name: text\n        dtype: string\n"
    card = b"---\ndataset_info:\n  features:\n  - name: messages\n" + part + b"  - name: images\n    list: image\n---\n"
    chat = [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "Which?"}]}]
    images = [{"bytes": b"a picture", "path": None}]
    data = parquet(messages=[chat, chat], images=[images, images])
    server.add("datasets/org/set", {"README.md": card, "train.parquet": data})
    render = lambda messages: str([part["type"] for part in messages[0]["content"]])  # noqa: E731
    documents = list(read_documents_with_media(TextPart(source="org/set"), render))
    assert [document.media for document in documents] == [(Reference("image", b"a picture"),)] * 2
    assert documents[0].text == "['image', 'text']" and documents[0].text_alone == "['text']"


def test_configs(server: HubServer) -> None:
    server.add("datasets/org/set", {"README.md": CARD, "first/a.parquet": parquet(text=texts("one")),
                                    "second/a.parquet": parquet(text=texts("two"))})  # fmt: skip
    assert read(config="second") == texts("two")
    for error in (fails(), fails(config="third")):
        assert (error.code, error.allowed) == ("unknown_dataset_config", ("first", "second"))
        assert error.field == "/calibration/config"


def test_a_commit_is_read_whatever_happens_to_the_branch(server: HubServer) -> None:
    sha = server.add("datasets/org/set", {"train.parquet": parquet(text=texts("old"))})
    resolved = hub_dataset.resolve(TextPart(source="org/set"))
    assert resolved.revision == sha
    server.add("datasets/org/set", {"train.parquet": parquet(text=texts("new"))})
    assert list(read_documents(resolved)) == texts("old")
    assert read() == texts("new")
    assert fails(revision="nowhere").code == "hub_revision_not_found"


def test_the_names_of_quarks_script(server: HubServer) -> None:
    lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts("pile")).encode()
    server.add("datasets/mit-han-lab/pile-val-backup", {"val.jsonl.zst": zstandard.compress(lines)})
    assert read("pileval") == read("mit-han-lab/pile-val-backup") == texts("pile")
    card = b"---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n  - split: train\n    path: 2/t*\n---\n"
    server.add("datasets/Salesforce/wikitext", {"README.md": card, "2/train.parquet": parquet(text=["", "wiki"])})
    assert read("wikitext_for_gptq_benchmark") == ["", "wiki"]
    server.add("datasets/abisee/cnn_dailymail", {
        "README.md": card.replace(b"wikitext-2-raw-v1", b"3.0.0"), "2/t.parquet": parquet(article=["news"], id=["1"]),
    })  # fmt: skip
    assert read("cnn_dailymail") == ["news"]
    said = hub_dataset.resolve(TextPart(source="pileval", column="meta"))
    assert (said.source, said.split, said.column) == ("mit-han-lab/pile-val-backup", "validation", "meta")


def test_other_files_than_parquet(server: HubServer) -> None:
    server.add("datasets/org/set", {"train.jsonl.gz": gzip.compress(b'{"text": "a"}\n{"text": "b"}\n')})
    assert read() == ["a", "b"]


def test_a_script_is_never_run(server: HubServer, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    script = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n".encode()
    server.add("datasets/org/set", {"set.py": script})
    assert fails().code == "unsupported_dataset"
    assert not mark.exists()


def test_what_the_hub_refuses(server: HubServer) -> None:
    assert fails("org/nothing").code == "hub_not_found"
    server.add("datasets/org/gated", {"train.parquet": parquet(text=["a"])}, gated=True)
    assert fails("org/gated").code == "hub_gated"
    server.add("datasets/org/set", {"README.md": b"no data"})
    assert fails().code == "unsupported_dataset"
    server.status = 503
    error = fails()
    assert (error.code, error.retryable) == ("hub_unreachable", True)
    assert "dataset" not in error.code and "model" not in error.message


@pytest.mark.parametrize("source", ["a b", "org/na..me", "https://x", "org/" + "x" * 200])
def test_names_that_are_none(source: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        hub_dataset.resolve(TextPart(source=source))
    assert caught.value.code == "invalid_dataset_name"
