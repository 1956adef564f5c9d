"""Jobs with a goal, over HTTP: the plan, what is refused, clones, the commands, and a real search."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import leases
from bitfoundry.client.service import Client
from bitfoundry.commands import main as cli
from quantcore.cli.auto import parser
from quantcore.cli.goal_flags import add_goal
from quantcore.report.values import Report
from tests.support.docs import read_page
from tests.support.models import tiny_model
from tests.support.service import REAL_ENGINE, ROOT, Server, WorkerProcess

GOAL = {"runtime": "vllm", "device": "24GB"}
MakeModel = Callable[..., Path]


def body(model: Path, **fields: Any) -> dict[str, Any]:
    return {"model": {"path": str(model)}, "goal": GOAL} | fields


def test_the_plan_is_an_upper_bound(client: TestClient, make_model: MakeModel) -> None:
    model = make_model()
    plan = client.post("/v1/plans", json=body(model)).json()
    largest = {
        "model": {"path": str(model)},
        "config": {"preset": "int8_weight_only"},
        "export": ["compressed_tensors"],
    }
    assert plan["size_after_bytes"] == client.post("/v1/plans", json=largest).json()["size_after_bytes"]
    assert plan["exports"] == ["compressed_tensors"] and plan["preset"] is None
    assert plan["goal"] == GOAL | {"min_recovery": 0.98, "context": 8192}
    assert "w4a16, int8_weight_only" in plan["warnings"][-1]
    assert (plan["possible_chains"], plan["time_s"]) == ([["gptq"], []], None)
    limit = plan["size_after_bytes"] - 1
    sized = client.post("/v1/plans", json=body(model, goal=GOAL | {"max_size": limit})).json()
    assert sized["size_after_bytes"] == limit
    matrix = model.with_name("im.gguf")
    matrix.write_bytes(b"GGUF")  # which only the engine reads
    given = {"algo_config": [{"name": "rtn", "imatrix": str(matrix)}]}
    goal = {"runtime": "llama_cpp", "device": "cpu"}
    assert client.post("/v1/plans", json=body(model, goal=goal, config=given)).json()["possible_chains"] == [["rtn"]]
    held = client.post("/v1/plans", json=body(model, hardware={"devices": "1x80GB"})).json()
    assert held["capacity"]["fits"], held


def test_what_cannot_be_is_refused(client: TestClient, make_model: MakeModel, subtests: pytest.Subtests) -> None:
    model = make_model()
    for fields, code, pointer in (
        ({"goal": GOAL | {"device": "h1000"}}, "unknown_device", "#/goal/device"),
        ({"goal": GOAL | {"max_size": "5 bananas"}}, "invalid_max_size", "#/goal/max_size"),
        ({"goal": GOAL | {"max_size": 1000}}, "goal_too_small", "#/goal"),
        ({"goal": GOAL | {"min_recovery": 1.5}}, "invalid_goal", "#/goal/min_recovery"),
        ({"goal": {"runtime": "vllm"}}, "missing_field", "#/goal/device"),
        ({"config": {"preset": "w4a16"}}, "conflicting_goal", "#/config"),
        ({"config": {"algo_config": [{"name": "gptq"}]}}, "conflicting_goal", "#/config"),
        ({"mix": {"schemes": ["w4a16", "fp8"], "max_bits": 5}}, "conflicting_goal", "#/mix"),
        ({"effort": "best"}, "conflicting_goal", "#/effort"),
        ({"export": ["gguf"]}, "conflicting_goal", "#/export"),
        ({"file2file": True}, "conflicting_goal", "#/file2file"),
    ):
        with subtests.test(code=code, pointer=pointer):
            answer = client.post("/v1/jobs", json=body(model) | fields)
            assert answer.status_code == 422, answer.text
            [fault] = answer.json()["errors"]
            assert fault["pointer"] == pointer, answer.text
            assert code in (fault["code"], answer.json()["code"]), answer.text


def test_leases_and_clones_know_it(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    answer = client.post("/v1/jobs", json=body(make_model()))
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert (job["export"], job["preset"]) == (["compressed_tensors"], None)
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
    assert lease is not None and lease.spec.goal is not None and lease.spec.goal.device == "24GB"
    other = {"runtime": "llama_cpp", "device": "cpu", "max_size": "1GB"}
    changed = client.post(f"/v1/jobs/{job['id']}/clone", json={"goal": other}).json()
    assert (changed["goal"]["runtime"], changed["export"]) == ("llama_cpp", ["gguf"])
    plain = client.post(f"/v1/jobs/{job['id']}/clone", json={"goal": None, "config": {"preset": "fp8"}}).json()
    assert (plain["goal"], plain["preset"], plain["export"]) == (None, "fp8", ["compressed_tensors"])


def test_the_commands_take_it(
    server: Server, make_model: MakeModel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = make_model()
    service = ["--url", server.url, "--api-key", server.key]
    flags = ["--runtime", "vllm", "--device", "h100", "--max_size", "4GB", "--min_recovery", "best", "--context", "2k"]
    assert cli.run(["submit", str(model), *flags, *service, "--json"]) == 0
    job = json.loads(capsys.readouterr().out)
    assert job["goal"] == {
        "runtime": "vllm", "device": "h100", "max_size": "4GB", "min_recovery": "best", "context": 2048,
        "max_time_s": None,
    }  # fmt: skip
    assert cli.run(["plan", str(model), *flags, *service]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "chosen from w4a16" in shown and "algorithms: gptaq or yaqa at first" in shown and "expected time" not in shown
    )
    assert cli.run(["show", job["id"], *service]) == 0
    assert "auto for vllm on h100" in " ".join(capsys.readouterr().out.split())
    assert cli.run(["submit", str(model), "--runtime", "vllm", *service]) != 0
    assert "there is no --device" in capsys.readouterr().err
    with Client(server.url, server.key) as client:
        assert client.submit(model, goal=GOAL).goal == GOAL | {
            "max_size": None, "min_recovery": 0.98, "context": 8192, "max_time_s": None,
        }  # fmt: skip


@pytest.mark.slow
def test_a_worker_finds_it(
    client: TestClient, settings: Settings, start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Any]
) -> None:
    model = tiny_model(settings.model_roots[0] / "model")
    start_worker(settings.model_copy(update=REAL_ENGINE))
    text = {"calibration": {"num_samples": 8, "seq_len": 64}, "evaluation": {"num_windows": 4, "seq_len": 64}}
    job = client.post("/v1/jobs", json=body(model, goal=GOAL | {"min_recovery": 0.9}, **text)).json()
    row = wait_for(job["id"], "succeeded", "failed", timeout_s=240.0)
    assert row.state == "succeeded", row.error
    report = Report.model_validate(client.get(f"/v1/jobs/{job['id']}/artifacts/report.json").json())
    assert report.goal is not None and report.goal.is_met
    shown = client.get(f"/v1/jobs/{job['id']}").json()
    assert shown["summary"]["verdict"] is not None and shown["config"] == job["config"]
    phases = [phase["name"] for phase in shown["phases"]]
    assert phases[:3] == ["resolve", "plan", "sensitivity"] and {"trial", "quantize", "verify"} <= {*phases}


@pytest.mark.slow
def test_the_page_of_goals(server: Server, settings: Settings, tmp_path: Path) -> None:
    model = tiny_model(settings.model_roots[0] / "model")
    reader = tmp_path / "reader"
    reader.mkdir()
    (reader / "SmolLM2-135M-Instruct").symlink_to(model)
    given = {"URL": server.url, "KEY": server.key, "MODEL": str(model)}
    reading = read_page("how-to/goals.md", reader, names=given, MODEL=str(model), **server.environment)
    assert json.loads((reader / "out" / "report.json").read_text())["goal"]["trials"]
    assert reading.names["job"].goal["runtime"] == "llama_cpp"


def test_the_flags_of_the_page_of_goals() -> None:
    page = (ROOT / "docs" / "how-to" / "goals.md").read_text("utf-8").partition("\n## How it works\n")[0]
    flags = {*parser()._option_string_actions}
    assert {*re.findall(r"--[a-z_]+", page)} <= flags
    goal = argparse.ArgumentParser()
    add_goal(goal, is_alone=True)
    assert {*goal._option_string_actions} - {"-h", "--help"} <= {*re.findall(r"--[a-z_]+", page)}
