"""What a model is, from its headers alone: local folders, our stand-in of the Hub, over HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from fastapi.testclient import TestClient
from huggingface_hub import constants

from api.settings import Settings
from quantcore.checkpoint.headers import read_local
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.pipeline.job import run
from quantcore.errors import ModelError
from quantcore.plan import planner as plan
from quantcore.plan.inspection import USUAL_PRESETS, inspect, inspect_hub, read_license
from tests.support.grids import on_grids
from tests.support.hub_server import HubServer
from tests.support.models import MIXTURES, tiny_model

CARD = "---\nlanguage: en\nlicense: apache-2.0\n---\n# license: none\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as hub:
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)  # of other processes
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub
        huggingface_hub.close_session()  # type: ignore[attr-defined]


@pytest.fixture
def model(settings: Settings) -> Path:
    folder = tiny_model(settings.model_roots[0] / "tiny")
    (folder / "README.md").write_text(CARD)
    return folder


def test_a_folder_is_counted_right(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = inspect(model)
    real = AutoModelForCausalLM.from_pretrained(model)
    assert found.num_parameters == sum(parameter.numel() for parameter in real.parameters())
    assert (found.model_type, found.architectures, found.num_blocks) == ("llama", ("LlamaForCausalLM",), 3)
    assert (found.license, found.tied_embeddings, found.experts, found.quantization) == ("apache-2.0", True, None, None)
    assert found.dtypes == {"BF16": found.num_parameters}
    assert found.size_bytes == (model / "model.safetensors").stat().st_size and found.num_files == 1
    linears = [module for module in real.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(layer["count"] for layer in found.linear_layers) == len(linears)
    assert {"name": "k_proj", "shape": [32, 64], "count": 3} in found.linear_layers


def test_the_estimates_are_those_of_the_plan(model: Path) -> None:
    headers = read_local(model)
    found = {each["preset"]: each for each in inspect(model).estimates}
    assert list(found) == list(USUAL_PRESETS)
    for name, export in (("fp8", "fp8"), ("w4a16", "awq"), ("gguf_q8_0", "gguf")):
        planned = plan.make_plan(
            JobSpec(config=presets.resolve(name), export=(export,), calibration=CalibrationConfig(seq_len=256)), headers
        )
        assert found[name]["size_bytes"][export] == planned.size_after_bytes
        assert found[name]["peak_memory_bytes"] == planned.peak_memory_bytes


def test_a_preset_that_does_not_fit_says_why(tmp_path: Path) -> None:
    found = {each["preset"]: each for each in inspect(tiny_model(tmp_path / "m", hidden_size=96)).estimates}
    assert found["w4a16"]["refused"]["code"] == "group_size_not_dividing"
    assert (found["w4a16"]["size_bytes"], found["w4a16"]["peak_memory_bytes"]) == ({}, None)
    assert found["fp8"]["size_bytes"] and "refused" not in found["fp8"]


def test_a_mixture_of_experts_and_a_head_of_its_own(tmp_path: Path) -> None:
    found = inspect(tiny_model(tmp_path / "m", model_type="mixtral", tie_word_embeddings=False, **MIXTURES["mixtral"]))
    assert found.experts == {"num_experts": 4, "num_per_token": 2} and not found.tied_embeddings
    assert found.license is None


def test_a_quantized_model_says_how(model: Path, tmp_path: Path, proof_in_this_process: Any) -> None:
    task = Task(
        model_dir=model, output_dir=tmp_path / "out", config=presets.resolve("fp8_dynamic"),
        calibration=CalibrationConfig(num_samples=2, seq_len=32), export=("compressed_tensors",),
        evaluation=EvaluationConfig(num_windows=0, seq_len=32),
    )  # fmt: skip
    run(task, lambda event: None)
    found, before = inspect(task.output_dir), inspect(model)
    assert found.quantization == {"quant_method": "compressed-tensors", "export": "compressed_tensors"}
    assert found.num_parameters == before.num_parameters and found.size_bytes < before.size_bytes
    assert "F8_E4M3" in found.dtypes and "already quantized" in found.warnings[0] and found.estimates

    config = json.loads((task.output_dir / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "strange"}
    (task.output_dir / "config.json").write_text(json.dumps(config))
    found = inspect(task.output_dir)
    assert found.quantization == {"quant_method": "strange", "export": None}
    assert found.estimates == () and "strange" in found.warnings[0]


def test_the_hub_is_asked_for_headers_alone(model: Path, hub: HubServer) -> None:
    sha = hub.add("org/tiny", model)
    found, commit = inspect_hub("org/tiny")
    assert commit == sha and found == inspect(model)
    assert all("range" in request.headers for request in hub.asked("/resolve/") + hub.asked("/cdn/"))
    assert hub.asked("tokenizer") == []
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    hub.add("org/tiny", model)
    found, _ = inspect_hub("org/tiny")
    assert found.quantization == {"quant_method": "gptq", "export": None} and found.estimates == ()
    hub.add("org/bad", {"config.json": b"{}"})
    with pytest.raises(ModelError, match="model_type"):
        inspect_hub("org/bad")


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ('---\nlicense: "llama3.1"\n---\n', "llama3.1"),
        ("license: mit\n", None),
        ("---\nlicense: mit\n", None),
        ("---\nlicense:\n- mit\n---\n", None),
        ("", None),
    ],
)
def test_the_licence_is_that_of_the_front_matter(tmp_path: Path, card: str, license: str | None) -> None:
    (tmp_path / "README.md").write_text(card)
    assert read_license(tmp_path) == license


def test_over_http(client: TestClient, model: Path, hub: HubServer) -> None:
    local = client.get("/v1/models/inspect", params={"path": str(model)})
    assert local.status_code == 200, local.text
    sha = hub.add("org/tiny", model)
    remote = client.get("/v1/models/inspect", params={"id": "org/tiny"}).json()
    assert remote["model"] == {"id": "org/tiny", "revision": "main", "sha": sha}
    assert local.json()["model"] == {"path": str(model)}
    assert {**remote, "model": None} == {**local.json(), "model": None}
    assert remote["num_blocks"] == 3 and len(remote["estimates"]) == len(USUAL_PRESETS)

    for query, code, where in (
        ({"path": "/etc"}, "path_not_allowed", {"pointer": "#/path"}),
        ({"path": str(model / "nothing")}, "model_not_found", {"pointer": "#/path"}),
        ({"id": "org/nothing"}, "hub_not_found", {"pointer": "#/id"}),
        ({"id": "org/tiny", "revision": "no"}, "hub_revision_not_found", {"pointer": "#/revision"}),
        ({"id": "../x"}, "invalid_model_id", {"parameter": ""}),
        ({}, "invalid_model", {"parameter": ""}),
        ({"path": str(model), "id": "org/tiny"}, "invalid_model", {"parameter": ""}),
        ({"path": str(model), "weights": "1"}, "unknown_field", {"parameter": "weights"}),
    ):
        answer = client.get("/v1/models/inspect", params=query)
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (422, code), problem
        assert where.items() <= problem["errors"][0].items(), problem


def test_weights_on_a_grid_are_named(client: TestClient, model: Path, hub: HubServer) -> None:
    assert client.get("/v1/models/inspect", params={"path": str(model)}).json()["grids"] == []
    on_grids(model, {"_proj": "gguf_q4_1"})
    found = client.get("/v1/models/inspect", params={"path": str(model)}).json()
    assert [(grid["title"], grid["share"]) for grid in found["grids"]] == [("Q4_1, groups of 32", 1.0)]
    [warning] = found["warnings"]
    assert "Q4_1, groups of 32 (100 %)" in warning and "against this model" in warning
    hub.add("org/tiny", model)
    remote = client.get("/v1/models/inspect", params={"id": "org/tiny"}).json()
    assert (remote["grids"], remote["warnings"]) == ([], [])  # its weights are not there
    planned = client.post("/v1/plans", json={"model": {"path": str(model)}, "config": {"preset": "int8_weight_only"}})
    assert planned.json()["warnings"] == [warning], planned.text


def test_the_models_that_jobs_can_read_are_found(client: TestClient, settings: Settings) -> None:
    folder = tiny_model(settings.model_roots[0] / "org" / "tiny")
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    found = client.get("/v1/models/folders").json()
    model = {"path": str(folder), "size_bytes": size_bytes, "is_result": False}
    assert found == {"data": [model], "is_complete": True}
    assert client.get("/v1/models/inspect", params={"path": found["data"][0]["path"]}).status_code == 200


def test_a_gguf_file_is_described_like_a_folder(model: Path, tmp_path: Path) -> None:
    whole = inspect(model)
    task = Task(
        model_dir=model, output_dir=tmp_path / "out", config=presets.resolve("gguf_q8_0"), export=("gguf",),
        calibration=CalibrationConfig(num_samples=4, seq_len=64), evaluation=EvaluationConfig(num_windows=0),
    )  # fmt: skip
    run(task, lambda event: None)
    for path in (tmp_path / "out", tmp_path / "out" / "model.gguf"):
        found = inspect(path)
        assert (found.model_type, found.num_parameters) == ("llama", whole.num_parameters)
        assert found.linear_layers == whole.linear_layers and found.quantization == {
            "quant_method": "gguf", "export": "gguf",
        }  # fmt: skip
        assert sum(found.dtypes.values()) == whole.num_parameters and found.dtypes["Q8_0"] > found.dtypes["BF16"]
        assert found.size_bytes == (tmp_path / "out" / "model.gguf").stat().st_size
