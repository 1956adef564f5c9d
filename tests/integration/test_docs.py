"""The Python code of the documentation runs, block after block."""

import re
from pathlib import Path

import pytest

from tests.factories import tiny_model

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with a model called ``model``."""
    folder = tmp_path_factory.mktemp("docs")
    tiny_model(folder / "model")
    return folder


def test_the_page_of_the_python_api(folder, monkeypatch):
    monkeypatch.chdir(folder)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert (folder / "exported" / "model.safetensors").is_file() and (folder / "onnx" / "model.onnx").is_file()
