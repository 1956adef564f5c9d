"""A manifest is believed only as far as the files bear it out."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from api.store import manifest
from quantcore.errors import ProofError


def write(folder: Path, contents: dict[str, bytes], **changes: Any) -> None:
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    entries = [{"path": n, "size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in contents.items()]
    (folder / "MANIFEST.json").write_text(json.dumps({"format": 1, "files": entries} | changes))


def entry(path: str) -> dict[str, Any]:
    return {"path": path, "size": 0, "sha256": "0" * 64}


def test_a_whole_folder_passes(tmp_path: Path) -> None:
    write(tmp_path, {"a.bin": b"abc", "deep/er/b.json": b"{}"})
    found = manifest.read(tmp_path)
    manifest.check(tmp_path, found)
    assert found.files.keys() == {"a.bin", "deep/er/b.json"}
    assert found.sha256 == hashlib.sha256((tmp_path / "MANIFEST.json").read_bytes()).hexdigest()
    assert found.num_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "path", ["../a", "/a", "a/../b", "a//b", "./a", "a\\b", "a\0b", "..", ".", "", "a/", "deep/../../a"]
)
def test_unsafe_paths(path: str, tmp_path: Path) -> None:
    write(tmp_path, {}, files=[entry(path)])
    with pytest.raises(ProofError) as caught:
        manifest.read(tmp_path)
    assert caught.value.code == "artifact_corrupt"


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"files": None},
        {"files": [{"path": "a"}]},
        {"files": [entry("a") | {"sha256": "x"}]},
        {"files": [entry("a") | {"size": -1}]},
        {"files": [entry("a"), entry("a")]},
    ],
)
def test_manifests_that_are_none(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, {}, **changes)
    with pytest.raises(ProofError):
        manifest.read(tmp_path)
    (tmp_path / "MANIFEST.json").unlink()
    with pytest.raises(ProofError):
        manifest.read(tmp_path)


def test_damage_of_every_kind(tmp_path: Path) -> None:
    def damaged(what: str) -> None:
        with pytest.raises(ProofError, match=what):
            manifest.check(tmp_path, manifest.read(tmp_path))

    files = {"a.bin": b"abc", "b.bin": b"xyz"}
    write(tmp_path, files)
    (tmp_path / "a.bin").write_bytes(b"abd")
    damaged("a.bin")
    (tmp_path / "a.bin").write_bytes(b"abcd")
    damaged("a.bin")
    (tmp_path / "a.bin").unlink()
    damaged("a.bin")
    (tmp_path / "a.bin").symlink_to(tmp_path / "b.bin")
    damaged("a.bin")
    (tmp_path / "a.bin").unlink()
    write(tmp_path, files)
    (tmp_path / "extra.bin").write_bytes(b"")
    damaged("extra.bin")
    (tmp_path / "extra.bin").unlink()
    (tmp_path / "loop").symlink_to(tmp_path)
    damaged("loop")
