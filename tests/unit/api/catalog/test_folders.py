"""The search for models below the folders of the service: what it finds, and where it stops."""

from pathlib import Path

import pytest

from api.catalog import folders
from api.catalog.folders import FoundModel, find_models


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"12345")


def test_models_are_found_below_the_roots(tmp_path: Path) -> None:
    roots = [tmp_path / "home", tmp_path / "models"]
    make(roots[0], "data/jobs/a/config.json", "data/jobs/a/model.safetensors", "work/deep/gguf/one.gguf", "notes.txt")
    make(roots[1], "b/config.json", "b/model-1.safetensors", "b/model-2.safetensors", "b/inner/two.gguf")
    make(roots[1], "two/a.gguf", "two/b.gguf", "code/config.json", ".hidden/c.gguf")
    (roots[1] / "link").symlink_to(roots[0] / "work")
    found = find_models([*roots, roots[0] / "work"], besides=roots[0] / "data")
    assert found.models == (
        FoundModel(roots[0] / "work" / "deep" / "gguf", 5),
        FoundModel(roots[1] / "b", 10),
    )
    assert found.is_complete


def test_results_are_told_from_models(tmp_path: Path) -> None:
    """The first page offered to quantize a result again, since it is smaller than its original."""
    make(tmp_path, "model/config.json", "model/model.safetensors")
    make(tmp_path, "out/config.json", "out/model.safetensors", "out/report.json")
    make(tmp_path, "several/report.json", "several/awq/config.json", "several/awq/a.safetensors", "several/gguf/a.gguf")
    found = find_models([tmp_path], besides=tmp_path / "data").models
    assert {each.path.relative_to(tmp_path).as_posix(): each.is_result for each in found} == {
        "model": False, "out": True, "several/awq": True, "several/gguf": True,
    }  # fmt: skip


def test_a_root_may_be_a_model_and_lie_in_the_data_folder(tmp_path: Path) -> None:
    make(tmp_path, "models/config.json", "models/model.safetensors", "else/a.gguf")
    assert find_models([tmp_path, tmp_path / "models"], besides=tmp_path).models == (
        FoundModel(tmp_path / "models", 5),
    )


def test_a_root_that_is_not_there_has_no_models(tmp_path: Path) -> None:
    assert find_models([tmp_path / "gone"], besides=tmp_path / "data") == folders.FoundModels((), True)


@pytest.mark.parametrize("limit", ["MAX_DEPTH", "MAX_FOLDERS", "MAX_ENTRIES", "MAX_MODELS"])
def test_a_search_that_ends_early_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    make(tmp_path, "a/one.gguf", "b/c/two.gguf")
    assert find_models([tmp_path], besides=tmp_path / "data").is_complete
    monkeypatch.setattr(folders, limit, 1)
    found = find_models([tmp_path], besides=tmp_path / "data")
    assert not found.is_complete and len(found.models) < 2


def test_a_name_that_no_job_can_have_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "\udc80").mkdir()
    (tmp_path / "\udc80" / "a.gguf").write_bytes(b"")
    assert find_models([tmp_path], besides=tmp_path / "data").models == ()
