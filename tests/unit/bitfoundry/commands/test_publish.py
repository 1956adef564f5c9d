"""A folder that is pulled holds the files of one version of the registry, and no others."""

from pathlib import Path
from typing import Any

import pytest

from bitfoundry.client.answers import ArtifactFile
from bitfoundry.client.model_answers import ModelVersion
from bitfoundry.commands.publish import _check_version
from bitfoundry.errors import BitfoundryError

FILES = [
    ArtifactFile(path="sub/model.safetensors", bytes=1, sha256="a" * 64),
    ArtifactFile(path="MANIFEST.json", bytes=1, sha256="b" * 64),
]


def version(sha256: str = "b" * 64) -> ModelVersion:
    about: dict[str, Any] = {"job_id": "job_1", "finished_at": "2026-11-22", "recipe": {}, "model": "bot", "version": 2}
    return ModelVersion(
        **about, aliases=[], source="/models/tiny", export=["quark"], bytes=2, sha256=sha256, created_at="2026-11-22"
    )


def test_a_download_that_was_broken_off_continues(tmp_path: Path) -> None:
    _check_version(version(), FILES, tmp_path / "new")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.safetensors.partial").touch()
    (tmp_path / "MANIFEST.json").touch()
    _check_version(version(), FILES, tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.bin").touch()
    with pytest.raises(BitfoundryError, match=r"sub/other.bin, which is not a file of bot@2") as refusal:
        _check_version(version(), FILES, tmp_path)
    assert refusal.value.code == "folder_not_empty"


@pytest.mark.parametrize("files", [FILES, FILES[:1]])
def test_another_manifest_is_refused(files: list[ArtifactFile], tmp_path: Path) -> None:
    with pytest.raises(BitfoundryError, match="not those of bot@2") as refusal:
        _check_version(version("c" * 64), files, tmp_path)
    assert refusal.value.code == "artifact_changed"
