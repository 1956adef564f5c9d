"""Plans over HTTP that are held against hardware: the engine's own answer, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig
from quantcore.importing.model import read_model
from quantcore.plan.capacity import plan_for
from quantcore.plan.hardware import parse_hardware

MakeModel = Callable[..., Path]


def body(folder: Path, preset: str, hardware: dict[str, Any] | None) -> dict[str, Any]:
    asked = {"model": {"path": str(folder)}, "config": {"preset": preset}, "calibration": {"num_samples": 16}}
    return asked if hardware is None else {**asked, "hardware": hardware}


@pytest.mark.parametrize("preset", ["int8_dynamic", "int8_static"])
def test_the_answer_is_the_engine_s(client: TestClient, make_model: MakeModel, preset: str) -> None:
    model = make_model()
    given = {"devices": "2x80GB", "nodes": 2, "host_memory": "64GB", "disk": "1TB"}
    answer = client.post("/v1/plans", json=body(model, preset, given))
    assert answer.status_code == 200, answer.text
    headers = read_model(model).headers
    expected = plan_for(
        parse_hardware("2x80GB", 2, "64GB", "1TB"),
        JobSpec(config=presets.resolve(preset), calibration=CalibrationConfig(num_samples=16)),
        headers,
    ).to_dict()
    found = answer.json()["capacity"]
    assert found == expected and found["fits"] and found["hardware"]["num_ranks"] == 4
    assert found["executor"] == ("file_to_file" if preset == "int8_dynamic" else "streamed")
    assert "capacity" not in client.post("/v1/plans", json=body(model, preset, None)).json()


def test_what_does_not_fit_says_so(client: TestClient, make_model: MakeModel) -> None:
    answer = client.post("/v1/plans", json=body(make_model(), "int8_static", {"devices": "1x1MB", "disk": "1MB"}))
    found = answer.json()["capacity"]
    assert not found["fits"] and found["faults"][0].startswith("A device has 0.0 GB, but ") and found["advice"]


ODD = {
    "invalid_hardware": ({"devices": "many"}, "#/hardware/devices"),
    "invalid_hardware ": ({"disk": "1XB"}, "#/hardware/disk"),
    "invalid_request": ({"nodes": 0}, "#/hardware/nodes"),
}


@pytest.mark.parametrize("code", ODD)
def test_odd_hardware_is_refused(client: TestClient, make_model: MakeModel, code: str) -> None:
    hardware, pointer = ODD[code]
    answer = client.post("/v1/plans", json=body(make_model(), "int8_dynamic", hardware))
    assert answer.status_code == 422
    problem = answer.json()
    assert [error["pointer"] for error in problem["errors"]] == [pointer], problem


def test_a_job_is_told_where_to_ask(client: TestClient, make_model: MakeModel) -> None:
    """Hardware is a plan's: a job runs on the workers that there are."""
    answer = client.post("/v1/jobs", json=body(make_model(), "int8_dynamic", {"devices": "1x80GB"}))
    assert answer.status_code == 422


WRONG_CHAINS = {
    "an option": (
        [{"name": "smoothquant"}, {"name": "gptq", "damp_percent": 2}],
        "#/config/algo_config/1/damp_percent",
    ),
    "an unknown name": ([{"name": "magic"}], "#/config/algo_config/0"),
    "the order": ([{"name": "gptq"}, {"name": "awq"}], "#/config/algo_config"),
}


@pytest.mark.parametrize("case", WRONG_CHAINS)
def test_a_wrong_algorithm_beside_a_preset_is_named_by_its_place(
    client: TestClient, make_model: MakeModel, case: str
) -> None:
    chain, pointer = WRONG_CHAINS[case]
    asked = body(make_model(), "w4a16", None)
    answer = client.post("/v1/plans", json=asked | {"config": {"preset": "w4a16", "algo_config": chain}})
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
