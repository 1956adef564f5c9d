"""Jobs whose schemes are chosen layer by layer: from the request to the artifact, on one process and on several, killed
and not."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from fastapi.testclient import TestClient

from api.settings import Settings
from api.store.engine import Sessions
from api.store.queue import leases
from bitfoundry.client import answers
from bitfoundry.client.service import Client
from bitfoundry.commands import main as cli
from quantcore.cli.main import main
from quantcore.config.job_spec import MixConfig
from quantcore.config.quantization import parse_config
from quantcore.engine.blockwise import savepoint
from quantcore.engine.mixed_precision import command
from quantcore.engine.pipeline import writer as writing
from quantcore.plan.mix_schemes import resolve
from tests.support.docs import blocks_of, read_page
from tests.support.forks import events_of, forked, killed, task_file
from tests.support.models import tiny_model
from tests.support.params import with_rare
from tests.support.proofs import proving_here
from tests.support.service import REAL_ENGINE, ROOT, Server, WorkerProcess

SCHEMES = ("w4a16", "int8_weight_only")
ASKED = {"schemes": list(SCHEMES), "max_bits": 5.5}
NOTHING = {"global_quant_config": {}}
StartWorker = Callable[..., WorkerProcess]
MakeModel = Callable[..., Path]


def engine_mix(**budget: Any) -> dict[str, Any]:
    """As a worker writes it into the task."""
    return resolve(MixConfig(schemes=SCHEMES, **budget)).model_dump(mode="json", exclude_none=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", dtype=torch.float32, rank=8)


@pytest.fixture(scope="module")
def undisturbed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The artifact and the events of a job that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    file = mixed_task(model_dir, folder / "out", mix=engine_mix(max_bits=5.5))
    with proving_here():
        assert forked(lambda _: main(["run", str(file)]), 1, folder) == [0], (folder / "err.0").read_text()
    return folder / "out", events_of(folder)


def mixed_task(model_dir: Path, output_dir: Path, given: dict[str, Any] = NOTHING, **more: Any) -> Path:
    calibration = {"num_samples": 16, "seq_len": 32}
    return task_file(model_dir, output_dir, given, ("quark",), calibration=calibration, **more)


def phases_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["phase"] for event in events if event["kind"] == "phase_started"]


@pytest.mark.slow
def test_the_engine_measures_chooses_and_goes_on(
    undisturbed: tuple[Path, list[dict[str, Any]]], model_dir: Path
) -> None:
    folder, events = undisturbed
    phases = ["resolve", "plan", "sensitivity", "trial", "quantize", "export", "verify"]
    assert phases_of(events) == phases
    told = [event for event in events if event["kind"] == "progress" and event["phase"] == "sensitivity"]
    assert [event["done"] for event in told] == list(range(1, 2 * 3 + 1)) and {one["total"] for one in told} == {6}
    report = json.loads((folder / "report.json").read_text())
    jsonschema.validate(report, json.loads((ROOT / "docs/report.schema.json").read_text()))
    mix, config = report["mix"], parse_config(report["config"])
    schemes = {layer["scheme"] for layer in report["layers"]}
    assert len(schemes) == 2 == len({json.dumps(one.to_dict()) for one in (
        config.global_quant_config, *config.layer_quant_config.values())})  # fmt: skip
    assert mix["asked"] == ASKED and sum(mix["chosen"]["layers"].values()) == len(report["layers"])
    assert mix["chosen"]["bits"] <= 5.5 < mix["uniform"]["int8_weight_only"]["bits"]
    assert mix["chosen"]["size_bytes"] == report["summary"]["size_after_bytes"]
    assert report["summary"]["mix"]["layers"] == mix["chosen"]["layers"]
    sizes = [one["size_bytes"] for one in mix["frontier"]]
    assert sizes == sorted(sizes) and sizes[0] == mix["uniform"]["w4a16"]["size_bytes"]
    page = (folder / "report.html").read_text()
    assert "Mixed precision" in page and page.count("<circle") == len(report["layers"]) + len(sizes) + 1
    card = (folder / "README.md").read_text()
    assert "for `max_bits 5.5`: " in card and f"; {mix['chosen']['bits']:.2f} bits per weight." in card
    assert all(f"{num} `{scheme}`" in card for scheme, num in mix["chosen"]["layers"].items())
    again = (folder / "reproduce.sh").read_text()
    assert '\\"mix\\"' not in again and "sensitivity" not in again, "what was chosen is not chosen again"


@pytest.mark.slow
def test_algorithms_are_applied_on_top(
    undisturbed: tuple[Path, list[dict[str, Any]]], model_dir: Path, tmp_path: Path, proof_in_this_process: None
) -> None:
    given = {**NOTHING, "algo_config": [{"name": "gptq"}]}
    file = mixed_task(model_dir, tmp_path / "out", given, mix=engine_mix(max_bits=5.5))
    assert forked(lambda _: main(["run", str(file)]), 1, tmp_path) == [0], (tmp_path / "err.0").read_text()
    found, plain = (json.loads((one / "report.json").read_text()) for one in (tmp_path / "out", undisturbed[0]))
    assert found["mix"] == plain["mix"], "the same choice"
    assert found["config"].pop("algo_config")[0]["name"] == "gptq"
    assert found["config"] == {name: value for name, value in plain["config"].items() if name != "algo_config"}
    assert all(one["output_error"] < one["rounding_error"] for one in found["layers"] if one["scheme"].startswith("u"))


KILLS = {
    "in the first block": (writing.ResultWriter, "write", 2),
    "in the third block": (writing.ResultWriter, "write", 16),
    "while it measures": (command, "units_of", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kill", with_rare(KILLS, ["in the first block"]))
def test_killed_after_measuring_it_keeps_what_was_chosen(
    kill: str, undisturbed: tuple[Path, list[dict[str, Any]]], model_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, proof_in_this_process: None,
) -> None:  # fmt: skip
    monkeypatch.setattr(savepoint, "MIN_WORK_PER_SAVE", 0)  # after every block
    resume_dir = tmp_path / "resume"
    file = mixed_task(model_dir, tmp_path / "out", mix=engine_mix(max_bits=5.5), resume_dir=str(resume_dir))

    def first(rank: int) -> int:
        monkeypatch.setattr(KILLS[kill][0], KILLS[kill][1], killed(*KILLS[kill]))
        return main(["run", str(file)])

    assert forked(first, 1, tmp_path) == [-9] and not (tmp_path / "out").exists()
    was_chosen = kill != "while it measures"
    assert (resume_dir / "mix.json").exists() == was_chosen
    assert not list(tmp_path.glob("bitfoundry-mix-*")) or not was_chosen, "measuring has tidied up"

    def second(rank: int) -> int:
        if was_chosen:  # it could not choose otherwise
            monkeypatch.delattr(command, "choose")
        return main(["run", str(file)])

    assert forked(second, 1, tmp_path) == [0], (tmp_path / "err.0").read_text()
    events = events_of(tmp_path)
    assert ("sensitivity" in phases_of(events)) != was_chosen
    blocks = {event["block"] for event in events if event["kind"] == "layer_quantized"}
    assert (blocks == {0, 1, 2}) == (kill != "in the third block")
    assert not resume_dir.exists()
    expected = undisturbed[0]
    for name in ("model.safetensors", "config.json", "plan.json"):
        assert (tmp_path / "out" / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.slow
def test_another_job_does_not_take_what_was_chosen(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof_in_this_process: None
) -> None:
    more = {"mix": engine_mix(max_bits=5.5), "resume_dir": str(tmp_path / "resume")}
    file = mixed_task(model_dir, tmp_path / "out", **more)

    def first(rank: int) -> int:
        monkeypatch.setattr(writing.ResultWriter, "write", killed(writing.ResultWriter, "write", 1))
        return main(["run", str(file)])

    assert forked(first, 1, tmp_path) == [-9]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mix": engine_mix(max_bits=6.5)}))
    assert forked(lambda _: main(["run", str(file)]), 1, tmp_path) == [0]
    assert "sensitivity" in phases_of(events_of(tmp_path))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert 5.5 < report["mix"]["chosen"]["bits"] <= 6.5


def test_several_processes_share_what_the_first_one_chose(
    undisturbed: tuple[Path, list[dict[str, Any]]], model_dir: Path, tmp_path: Path, proof_in_this_process: None
) -> None:
    file = mixed_task(model_dir, tmp_path / "out", mix=engine_mix(max_bits=5.5))
    assert forked(lambda _: main(["run", str(file)]), 2, tmp_path) == [0, 0], (tmp_path / "err.0").read_text()
    assert phases_of(events_of(tmp_path)).count("sensitivity") == 1 and events_of(tmp_path, 1) == []
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (undisturbed[0] / name).read_bytes(), name


@pytest.mark.parametrize("size", [1, 2])
def test_a_budget_that_is_too_small_is_said(size: int, model_dir: Path, tmp_path: Path) -> None:
    file = mixed_task(model_dir, tmp_path / "out", mix=engine_mix(max_size=1000))
    assert forked(lambda _: main(["run", str(file)]), size, tmp_path) == [1] * size
    [failed] = [event for event in events_of(tmp_path) if event["kind"] == "failed"]
    assert failed["code"] == "budget_too_small" and not failed["retryable"] and not (tmp_path / "out").exists()


@pytest.fixture
def model(settings: Settings) -> Path:
    """One that the service may read."""
    return tiny_model(settings.model_roots[0] / "tiny", dtype=torch.float32, rank=8, max_position_embeddings=2048)


@pytest.mark.slow
def test_the_page_of_mixed_precision_in_the_service(
    server: Server, model: Path, settings: Settings, start_worker: StartWorker, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its commands, and a real job by its words."""
    start_worker(settings.model_copy(update=REAL_ENGINE))
    (tmp_path / "reader").mkdir()
    (tmp_path / "reader" / "SmolLM2-135M-Instruct").symlink_to(model)
    given = {"URL": server.url, "KEY": server.key, "MODEL": str(model)}
    reading = read_page(
        "how-to/mixed-precision.md", tmp_path / "reader", names=given, MODEL=str(model), **server.environment
    )
    names = reading.names
    assert parse_config(json.loads((tmp_path / "reader" / "mix.json").read_text())).layer_quant_config
    assert (tmp_path / "reader" / "out" / "report.json").is_file()
    job: answers.Job = names["job"]
    assert job.state == "succeeded" and job.summary is not None, job.error
    assert job.summary.mix is not None and str(job.summary.mix) in capsys.readouterr().out
    assert job.mix == {"schemes": list(SCHEMES), "max_bits": 5.0} and job.preset is None
    phases = ["resolve", "plan", "sensitivity", "trial", "quantize", "export", "verify"]
    assert [phase.name for phase in job.phases if phase.state == "done"] == phases
    assert job.summary.mix.bits <= 5 and len(job.summary.mix.layers) == 2, "more than one scheme"
    shown = f": {job.summary.mix.bits:.2f} bits per weight"
    assert cli.run(["show", job.id, "--url", server.url, "--api-key", server.key]) == 0
    assert shown in " ".join(capsys.readouterr().out.split())
    with Client(server.url, server.key) as client:
        folder = client.download(job.id, model.parent / "artifact")
        report = json.loads((folder / "report.json").read_text())
        assert [one["name"] for one in report["config"]["algo_config"]] == ["gptq"]
        assert len({layer["scheme"] for layer in report["layers"]}) == 2
        assert report["summary"]["size_after_bytes"] == report["mix"]["chosen"]["size_bytes"]
        again = client.clone(job.id)
        assert (again.mix, again.config) == (job.mix, job.config)
        submit = next(block for block in blocks_of("how-to/mixed-precision.md") if "submit" in block.script)
        flags = shlex.split(submit.script.replace("$MODEL", str(model)))[1:]
        assert cli.run([*flags, "--url", server.url, "--api-key", server.key, "--json"]) == 0
        asked = json.loads(capsys.readouterr().out)["mix"]
        assert asked == {"schemes": [*SCHEMES, "keep"], "max_size": "90MB"}


def test_a_plan_says_what_a_mix_may_take_at_most(client: TestClient, make_model: MakeModel) -> None:
    model = make_model()
    plans = {
        name: client.post("/v1/plans", json={"model": {"path": str(model)}, "config": {"preset": name}}).json()
        for name in SCHEMES
    }
    asked = {"model": {"path": str(model)}, "mix": ASKED}
    found = client.post("/v1/plans", json=asked).json()
    dearest = plans["int8_weight_only"]
    assert found["size_after_bytes"] == dearest["size_after_bytes"] > plans["w4a16"]["size_after_bytes"]
    assert found["layers"] == dearest["layers"] and found["peak_memory_bytes"] >= dearest["peak_memory_bytes"]
    assert "int8_weight_only for all layers" in found["warnings"][-1] and found["mix"] == ASKED
    budget = plans["w4a16"]["size_after_bytes"] + 10
    sized = {"schemes": [*SCHEMES, "keep"], "max_size": budget}
    dry = client.post("/v1/jobs", params={"dry_run": True}, json=asked | {"mix": sized}).json()
    assert dry["size_after_bytes"] == budget
    kept = client.post("/v1/plans", json=asked | {"mix": {**ASKED, "schemes": [*SCHEMES, "keep"]}}).json()
    assert kept["size_after_bytes"] == kept["size_before_bytes"], "all layers may stay as they are"
    held = client.post("/v1/plans", json=asked | {"hardware": {"devices": "1x80GB"}}).json()["capacity"]
    assert held["executor"] == "streamed" and held["disk_bytes"]["measured_states"] > 0


def test_clones_sweeps_and_leases_know_it(client: TestClient, make_model: MakeModel, sessions: Sessions) -> None:
    model = {"path": str(make_model())}
    gptq = [{"name": "gptq"}]
    job = client.post("/v1/jobs", json={"model": model, "mix": ASKED, "config": {"algo_config": gptq}}).json()
    with sessions.begin() as session:
        lease = leases.claim(session, worker="w", lease_s=60)
    assert lease is not None and lease.spec.mix is not None
    assert lease.spec.to_dict()["mix"] == engine_mix(max_bits=5.5)
    assert lease.spec.config.algo_config[0].name == "gptq"
    changed = client.post(f"/v1/jobs/{job['id']}/clone", json={"mix": {"schemes": list(SCHEMES), "max_size": "9GB"}})
    assert changed.json()["mix"]["max_size"] == "9GB" and changed.json()["config"] == job["config"]
    plain = client.post(f"/v1/jobs/{job['id']}/clone", json={"mix": None, "config": {"preset": "fp8"}}).json()
    assert (plain["mix"], plain["preset"]) == (None, "fp8")
    both = client.post(f"/v1/jobs/{job['id']}/clone", json={"config": {"preset": "fp8"}})
    assert (both.status_code, both.json()["code"]) == (422, "unsupported_config")
    matrix = {"/mix/max_bits": [4.8, 6]}
    sweep = client.post("/v1/sweeps", json={"job": {"model": model, "mix": {"schemes": SCHEMES}}, "matrix": matrix})
    assert [one["mix"]["max_bits"] for one in sweep.json()["jobs"]] == [4.8, 6.0]
    wrong = {"job": {"model": model}, "matrix": {"/mix/schemes": [["w4a16"], list(SCHEMES)], "/mix/max_bits": [5]}}
    [entry] = client.post("/v1/sweeps", json=wrong).json()["errors"]
    assert (entry["pointer"], entry["code"]) == ("#/job/mix/schemes", "invalid_schemes")


def test_a_request_without_a_scheme_says_so(client: TestClient, make_model: MakeModel) -> None:
    answer = client.post("/v1/jobs", json={"model": {"path": str(make_model())}})
    assert (answer.status_code, answer.json()["code"]) == (422, "config_required")
    assert answer.json()["errors"][0]["pointer"] == "#/config"
