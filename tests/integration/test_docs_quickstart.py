"""The pages for somebody who starts: read beside a service that `bitfoundry up` runs, with the real engine."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docs import read_page
from tests.support.models import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A reader's folder, with the model and, in ``home``, the data of a running service."""
    with tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as name:
        folder = Path(name)
        tiny_model(folder / "SmolLM2-135M-Instruct", num_hidden_layers=1, max_position_embeddings=2048)
        command = [sys.executable, "-m", "bitfoundry", "up", "--home", folder / "home", "--port", "0", "--json"]
        with subprocess.Popen([*command, "--models", folder], stdout=subprocess.PIPE, text=True) as service:
            assert service.stdout is not None
            for line in service.stdout:
                if "}" in line:
                    break
            yield folder
            service.terminate()


def test_the_quickstart(folder: Path) -> None:
    reading = read_page("quickstart.md", folder, BITFOUNDRY_HOME=str(folder / "home"))
    assert "succeeded" in reading.output and "model.safetensors" in reading.outputs[1]
    assert reading.names["config"].global_quant_config.weight.dtype == "uint4"


def test_the_page_of_backups(folder: Path) -> None:
    read_page("how-to/back-up.md", folder, BITFOUNDRY_HOME=str(folder / "home"))
    assert (folder / "restored-bitfoundry" / "secret.key").is_file()
