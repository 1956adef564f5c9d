"""Which two models `bitfoundry chat` opens."""

import json
from pathlib import Path
from typing import Any

import pytest

from quantcore.cli.chat import find_artifact, original_of, parser, source_of
from quantcore.errors import ModelError
from tests.support.reports import report


def write(folder: Path, **model: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report() | {"model": {"model_type": "llama", **model}}))
    return folder


def test_the_report_names_the_original(tmp_path: Path) -> None:
    out = write(tmp_path / "out", path=str(tmp_path))
    assert original_of(source_of(out)) == str(tmp_path)
    (out / "quark").mkdir()
    assert original_of(source_of(out / "quark")) == str(tmp_path), "one of several exports has its report above it"
    assert original_of(source_of(write(out, id="org/name", sha="0" * 40))) == "org/name"
    assert source_of(tmp_path / "without" / "report") is None


def test_an_original_that_is_gone_must_be_given(tmp_path: Path) -> None:
    gone = write(tmp_path / "out", path=str(tmp_path / "gone"))
    with pytest.raises(ModelError) as caught:
        original_of(source_of(gone))
    assert caught.value.code == "original_not_found"
    assert "--against ORIGINAL" in caught.value.hint and "--alone" in caught.value.hint


def test_a_folder_must_be_there_and_hold_one_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        find_artifact(tmp_path / "nothing")
    assert caught.value.code == "model_not_found"
    out = write(tmp_path / "out", path="model")
    assert find_artifact(out) == out and find_artifact(tmp_path) == tmp_path
    data = report()
    data["summary"]["exports"] = {name: {"path": name, "bytes": 1, "load": "load"} for name in ("quark", "gptq")}
    (out / "report.json").write_text(json.dumps(data))
    with pytest.raises(ModelError) as caught:
        find_artifact(out)
    assert caught.value.code == "several_models" and str(out / "quark") in caught.value.hint


def test_the_flags() -> None:
    options = parser().parse_args(["out", "--prompt", "a b", "c", "--prompt", "d"])
    assert (options.prompt, options.max_new_tokens, options.against) == (["a b", "c", "d"], 200, None)
    with pytest.raises(SystemExit):
        parser().parse_args(["out", "--max_new_tokens", "0"])
    with pytest.raises(SystemExit):
        parser().parse_args(["out", "--alone", "--against", "original"])
