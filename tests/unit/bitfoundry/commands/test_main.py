"""The command line: exit codes, errors for people and for programs, and where it finds the service."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from bitfoundry.client.answers import (
    ArtifactFile,
    Event,
    Job,
    KeptTensor,
    LogLine,
    Plan,
    Summary,
)
from bitfoundry.client.connection import Connection
from bitfoundry.client.model_answers import ModelFolders, ModelResults, Sweep, UsedModel
from bitfoundry.client.user_config import UserConfig
from bitfoundry.commands import main as cli
from bitfoundry.commands import options
from bitfoundry.commands.headings import HEADINGS
from bitfoundry.errors import ApiError, BitfoundryError
from quantcore.plan.this_machine import host_memory_bytes
from tests.support.models import tiny_model

SUMMARY: dict[str, Any] = {
    "size_before_bytes": 269_000_000,
    "size_after_bytes": 164_000_000,
    "perplexity_before": 20.0,
    "perplexity_after": 20.2,
    "worst_layer": {"name": "model.layers.3.mlp.down_proj", "relative_error": 0.012, "sqnr_db": 38.1},
    "num_layers_quantized": 21,
    "num_layers_kept": 1,
    "quantize_s": 50.1,
    "total_s": 61.2,
    "peak_memory_bytes": 700_000_000,
    "planned_peak_memory_bytes": 710_000_000,
    "gate": "warn",
    "exports": {"quark": {"path": "quark", "bytes": 1, "load": "LLM('quark', quantization='quark')"}},
}
JOB = Job(
    id="job_1",
    state="succeeded",
    name="mine",
    priority=5,
    pinned=False,
    attempt=1,
    cancel_requested=False,
    model={"path": "/m"},
    config={},
    preset="fp8",
    created_at="2026-11-21T12:00:00Z",
    summary=SUMMARY,
)


SWEEP = Sweep(
    id="swp_1",
    created_at="2026-11-21T12:00:00Z",
    matrix={"/config/preset": ["fp8"]},
    total=1,
    by_state={"succeeded": 1},
    jobs=[JOB.model_copy(update={"sweep_values": {"/config/preset": "fp8"}})],
)


PLAN = Plan(
    model_type="llama",
    num_blocks=3,
    num_layers=21,
    layers=[],
    kept=[KeptTensor(name="lm_head", reason="excluded")],
    exports=["quark"],
    config={},
    calibration={},
    needs_calibration=False,
    executor="streamed",
    size_before_bytes=2,
    size_after_bytes=1,
    peak_memory_bytes=1,
    warnings=["mind this"],
)


class FakeClient:
    """Remembers what it was asked; answers with JOB unless told to fail."""

    failure: ApiError | None = None
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]

    def __init__(self, url: str, key: str) -> None:
        type(self).calls = [("connect", (url, key), {})]

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *raised: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            self.calls.append((name, args, named))
            if self.failure:
                raise self.failure
            answers: dict[str, Any] = {
                "list": iter([JOB, JOB.model_copy(update={"id": "job_2", "state": "running", "phase": "quantize"})]),
                "events": iter([Event(seq=1, at="2026-11-21T12:00:00Z", kind="progress", data={"done": 3})]),
                "stream_events": iter([Event(seq=1, at="2026-11-21T12:00:00Z", kind="progress", data={"done": 3})]),
                "logs": iter([LogLine(seq=1, at="2026-11-21T12:00:00Z", attempt=1, level="info", text="hello")]),
                "stream_logs": iter([LogLine(seq=1, at="2026-11-21T12:00:00Z", attempt=1, level="info", text="hello")]),
                "summary": Summary(total=3, by_state={"queued": 3, "failed": 0}),
                "delete": None,
                "sweeps": iter([SWEEP]),
                **dict.fromkeys(("submit_sweep", "sweep", "cancel_sweep"), SWEEP),
                "presets": [{"name": "fp8", "title": "eight bits", "recipes": {"balanced": [{"name": "gptq"}]}}],
                "artifacts": [ArtifactFile(path="a", bytes=1, sha256="0")],
                **dict.fromkeys(("download", "download_tar"), args[1] if len(args) > 1 else None),
                "plan": PLAN,
                "models": iter([UsedModel(name="/m", num_jobs=2, num_results=0, active_at="2026-11-21T12:00:00Z")]),
                "results_of": ModelResults(model="/m", data=[]),
                "model_folders": ModelFolders(data=[], is_complete=True),
            }
            return answers.get(name, JOB)

        return call


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeClient]:
    monkeypatch.setattr("bitfoundry.client.service.Client", FakeClient)
    monkeypatch.setattr(FakeClient, "failure", None)
    monkeypatch.setenv("BITFOUNDRY_URL", "http://service")
    monkeypatch.setenv("BITFOUNDRY_API_KEY", "bf_key")
    monkeypatch.setenv("BITFOUNDRY_HOME", str(tmp_path))
    monkeypatch.setenv("BITFOUNDRY_CONFIG", str(tmp_path / "config.toml"))
    return FakeClient


COMMANDS: list[list[str]] = [
    ["submit", "/m", "--config", "fp8"],
    ["plan", "/m", "--config", "fp8"],
    ["list"],
    ["show", "job_1"],
    ["watch", "job_1"],
    ["events", "job_1"],
    ["events", "job_1", "--follow"],
    ["logs", "job_1", "--follow"],
    ["logs", "job_1", "--tail", "3", "--level", "info"],
    ["list", "--count"],
    *([action, "job_1"] for action in ("cancel", "pause", "resume", "retry", "edit", "delete")),
    ["clone", "job_2", "--name", "mine"],
    ["sweep", "submit", str(Path(__file__).with_name("sweep.json"))],
    ["sweep", "show", "swp_1"],
    ["sweep", "cancel", "swp_1"],
    ["presets"],
    ["download", "job_1"],
    ["download", "job_1", "--tar"],
    ["models"],
    ["models", "/m"],
    ["models", "--folders"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_speaks_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*command, "--json"]) == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_speaks_to_people(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command) == 0
    said = capsys.readouterr()
    assert said.out.strip()
    assert not said.out.lstrip().startswith(("{", "["))
    assert said.err == ""


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_refusal_is_explained_with_status_1(
    command: list[str], fake: type[FakeClient], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"pointer": "#/config/preset", "detail": "fp9 is none", "allowed": ["fp8", "w4a16"]}
    problem = {"code": "unknown_preset", "detail": "no such preset", "hint": "use another", "errors": [place]}
    monkeypatch.setattr(fake, "failure", ApiError(422, problem))
    assert cli.run(command) == 1
    said = capsys.readouterr().err
    for part in ("no such preset", "#/config/preset", "fp8, w4a16", "use another", "unknown_preset"):
        assert part in said
    assert cli.run([*command, "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["error"]["code"] == "unknown_preset"


@pytest.mark.parametrize("wrong", [["submit"], ["nonsense"], ["list", "--limit", "x"], ["list", "--limit", "0"]])
def test_wrong_usage_is_status_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(wrong) == 2
    assert "Usage" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--max-waiting", "--max_waiting"])
def test_options_take_dashes_and_underscores(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Some commands took both and some only one; AMD Quark's flags, which `quantize` has, have underscores."""
    assert cli.run(["projects", "create", "search", option, "many"]) == 2
    assert "Invalid value for '--max-waiting'" in capsys.readouterr().err


def test_an_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bitfoundry.client.service.Client", interrupted)
    assert cli.run(["list"]) == 130


@pytest.mark.parametrize("command", ["submit", "plan"])
def test_a_mix_is_passed_on(command: str, fake: type[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"{command} /m --schemes w4a16,keep"
    assert cli.run(f"{asked} --max_bits 4.5".split()) == 0
    _, _, named = fake.calls[1]
    assert "config" not in named and named["mix"] == {"schemes": ["w4a16", "keep"], "max_bits": 4.5}
    for flag in ("--max_size 1GB", "--max_divergence 0.1"):
        assert cli.run(f"{command} /m -c fp8 {flag}".split()) == 2
        assert f"{flag.split()[0]} needs --schemes" in capsys.readouterr().err


def test_submit_passes_everything_on(fake: type[FakeClient], tmp_path: Path) -> None:
    config = tmp_path / "mine.json"
    config.write_text('{"global_quant_config": {}}')
    line = f"submit /m -c {config} --export quark --export compressed_tensors --num-samples 4 --name n --label a=b=c"
    line += " --priority 9 --max-runtime-s 60 --max-shard-size 500MB --gate fail"
    line += " --publish org/out --publish-token team --file2file --no-shard-blocks --nodes 2"
    line += " --evaluation num_windows=64 --evaluation source=wikitext --evaluation tasks=gsm8k,piqa"
    assert cli.run(line.split()) == 0
    _, given, named = fake.calls[1]
    assert given == ("/m",)
    assert named == {
        "config": {"global_quant_config": {}},
        "export": ["quark", "compressed_tensors"],
        "calibration": {"num_samples": 4},
        "name": "n",
        "labels": {"a": "b=c"},
        "priority": 9,
        "limits": {"max_runtime_s": 60},
        "max_shard_size": "500MB",
        "publish": {"repo_id": "org/out", "hub_token": "team"},
        "gate": "fail",
        "evaluation": {"num_windows": 64, "source": "wikitext", "tasks": ["gsm8k", "piqa"]},
        "file2file": True,
        "shard_blocks": False,
        "nodes": 2,
    }


def test_submit_takes_the_flags_of_quantize(
    fake: type[FakeClient], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the spelling of AMD Quark's script and with dashes; only what is given is sent."""
    line = "submit --model_dir /m --quant_scheme w4a16 --group_size 64 --exclude_layers lm_head *.o_proj"
    line += " --quant_algo awq,gptq --num_calib_data 7 --seq-len 32 --model_export gguf --skip_evaluation"
    assert cli.run(line.split()) == 0
    _, given, named = fake.calls[1]
    algorithms = named["config"].pop("algo_config")
    assert given == ("/m",) and [one["name"] for one in algorithms] == ["awq", "gptq"]
    assert named["config"] == {"preset": "w4a16", "group_size": 64, "exclude": ["lm_head", "*.o_proj"]}
    assert named["calibration"] == {"num_samples": 7, "seq_len": 32} and named["export"] == ["gguf"]
    assert named["evaluation"] == {"num_windows": 0}
    assert cli.run("submit /m --quant_scheme w4a16 --layer_quant_scheme *.v_proj fp8".split()) == 0
    config = fake.calls[1][2]["config"]
    assert list(config["layer_quant_config"]) == ["*.v_proj"], "more than a preset can say: a whole config"
    capsys.readouterr()
    assert cli.run("submit /m --quant-schema w4a16".split()) == 2
    assert "Did you mean --quant_scheme?" in capsys.readouterr().err
    assert cli.run("clone job_1 --group_size 64".split()) == 1
    assert "--group_size changes a scheme, but no scheme is given" in capsys.readouterr().err


def test_a_clone_with_the_name_of_its_original_says_so(
    fake: type[FakeClient], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run("clone job_1 --json".split()) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["name"] == "mine"
    assert "'mine' is the name of both jobs now." in said.err and "`last`" in said.err and "--name" in said.err
    monkeypatch.setattr(fake, "clone", lambda *_: JOB.model_copy(update={"name": "other"}), raising=False)
    assert cli.run("clone job_1 --name other".split()) == 0
    assert capsys.readouterr().err == ""


def test_each_fault_of_a_sweep_is_explained(
    fake: type[FakeClient], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [
        {"pointer": "#/job/calibration/samples", "detail": "no such field", "hint": "Did you mean 'num_samples'?",
         "values": {"/calibration/samples": 4}},
        {"pointer": "#/job/config/preset", "detail": "Unknown preset 'fp9'.", "hint": "Did you mean 'fp8'?",
         "values": {"/config/preset": "fp9"}},
    ]  # fmt: skip
    problem = {"code": "invalid_sweep", "detail": "0 of 4 jobs are valid.", "hint": faults[0]["hint"], "errors": faults}
    monkeypatch.setattr(fake, "failure", ApiError(422, problem))
    assert cli.run(["sweep", "submit", str(Path(__file__).with_name("sweep.json"))]) == 1
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "error 0 of 4 jobs are valid.", "#/job/calibration/samples no such field", "given: 4",
        "Did you mean 'num_samples'?", "#/job/config/preset Unknown preset 'fp9'.", "Did you mean 'fp8'?",
        "invalid_sweep",
    ]  # fmt: skip


def test_a_clone_changes_single_settings(fake: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"source": "wikitext", "split": "test", "num_samples": 8, "seq_len": 64, "seed": 0}
    original = JOB.model_copy(update={"calibration": text, "config": {"global_quant_config": {}}})
    monkeypatch.setattr(fake, "find", lambda self, job: original, raising=False)
    assert cli.run("clone job_1 --num_calib_data 99 --quant_algo gptq --priority 9".split()) == 0
    _, given, _ = fake.calls[1]
    assert given[1]["calibration"] == {**text, "num_samples": 99} and given[1]["priority"] == 9
    assert given[1]["config"].keys() == {"global_quant_config", "algo_config"}
    assert cli.run("clone job_1 --dataset builtin".split()) == 0
    assert fake.calls[1][1][1] == {"calibration": {"source": "builtin", "num_samples": 8, "seq_len": 64, "seed": 0}}
    assert cli.run("clone job_1 --dataset org/a:1,org/b:2".split()) == 0
    shared = [{"source": "org/a", "share": 1.0}, {"source": "org/b", "share": 2.0}]
    assert fake.calls[1][1][1] == {"calibration": {"sources": shared, "num_samples": 8, "seq_len": 64, "seed": 0}}


def test_a_plan_of_the_service_takes_the_way_that_is_asked_for(
    fake: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plan", "/m", "-c", "mxfp4", "--file2file"]) == 0
    assert fake.calls[1][2] == {"config": {"preset": "mxfp4"}, "file2file": True}
    assert "peak 0.0 MB, streamed" in capsys.readouterr().out
    assert cli.run(["plan", "/m", "--devices", "1x80GB", "--shard-blocks"]) == 2
    assert "--devices compares all execution modes" in capsys.readouterr().err


def test_a_config_file_that_is_no_json_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text("{")
    assert cli.run(["submit", "/m", "-c", str(tmp_path / "broken.json")]) == 1
    assert f"Cannot read {tmp_path / 'broken.json'}" in capsys.readouterr().err


def test_waiting_for_a_job_that_fails_is_status_1(fake: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = JOB.model_copy(update={"state": "failed", "summary": None})
    monkeypatch.setattr(fake, "wait", lambda self, job_id, on_change: failed, raising=False)
    for command in (["submit", "/m", "-c", "fp8", "--wait"], ["watch", "job_1"]):
        assert cli.run(command) == 1


@pytest.mark.slow
def test_the_service_of_up_is_found(
    fake: type[FakeClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BITFOUNDRY_URL")
    monkeypatch.delenv("BITFOUNDRY_API_KEY")
    assert cli.run(["list", "--count"]) == 1
    assert "bitfoundry up" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as listening:
        local = f"http://127.0.0.1:{listening.getsockname()[1]}"
        Connection(url=local, api_key="bf_local").write(tmp_path)
        assert cli.run(["list"]) == 0
    assert fake.calls[0][1] == (local, "bf_local")
    assert cli.run(["list", "--url", "http://other"]) == 1  # the local key is not sent elsewhere
    assert "needs an API key" in capsys.readouterr().err


def test_a_service_of_up_that_is_stopped_is_left_out_and_that_is_said(
    fake: type[FakeClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its address stays in the data folder: once `up` had run and ended, `list` and `presets` failed."""
    monkeypatch.setattr(fake, "calls", [], raising=False)
    monkeypatch.delenv("BITFOUNDRY_URL")
    monkeypatch.delenv("BITFOUNDRY_API_KEY")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    Connection(url=f"http://127.0.0.1:{port}", api_key="bf_local").write(tmp_path)
    for command, shown in (("presets", "w4a16"), ("list", "No matching jobs or runs")):
        assert cli.run([command]) == 0
        said = capsys.readouterr()
        assert shown in said.out and "the service of `bitfoundry up` is stopped" in said.err
    assert fake.calls == []
    assert cli.run(["list", "--url", "http://127.0.0.1:9", "--api-key", "bf_x"]) == 0  # one that is named is asked
    assert fake.calls[0][1] == ("http://127.0.0.1:9", "bf_x")


def test_the_connection_is_for_us_alone(tmp_path: Path) -> None:
    Connection(url="http://127.0.0.1:1", api_key="bf_secret").write(tmp_path)
    assert (tmp_path / "connection.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["connection.json"]
    (tmp_path / "connection.json").write_text("not json")
    assert Connection.read(tmp_path) is None


def test_quantize_hands_its_flags_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantcore.cli import main as engine

    given: list[str] = []
    monkeypatch.setattr(engine, "main", lambda arguments, find: given.extend(arguments) or 1)
    line = ["quantize", "--model_dir", "/m", "--output_dir", "/o", "--exclude_layers", "a", "b", "--json", "-h"]
    assert cli.run(line) == 1
    assert given == line


def test_a_missing_part_names_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "bitfoundry.local.stack", None)
    assert cli.run(["up"]) == 1
    assert "pip install 'bitfoundry[local]'" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "bitfoundry", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("bitfoundry 0.")


def test_what_needs_no_service_works_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("BITFOUNDRY_URL")
    assert cli.run(["presets", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["w4a16"]["exports"][0] == "awq" and rows["w4a16"]["recipes"]["balanced"][0]["name"] == "gptq"
    model_dir = tiny_model(tmp_path / "model", num_hidden_layers=3)
    assert cli.run(["inspect", str(model_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["num_blocks"]) == ({"path": str(model_dir)}, 3)
    assert cli.run(["inspect", str(tmp_path / "nothing"), "--json"]) == 1
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "model_not_found"
    assert cli.run(["plan", str(tmp_path / "nothing"), "fp8"]) == 1
    assert "model_not_found" in capsys.readouterr().err


def test_a_plan_without_a_service_is_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("BITFOUNDRY_URL")
    model_dir = tiny_model(tmp_path / "model")
    cards = [{"kind": "cuda", "name": "H100", "memory_bytes": 80_000_000_000, "used_bytes": None}] * 2
    for devices, shown in (([], "its CPU"), (cards, "2 x 80 GB")):
        monkeypatch.setattr("quantcore.plan.this_machine.find_devices", lambda devices=devices: devices)
        assert cli.run(["plan", str(model_dir), "w4a16", "--json"]) == 0
        printed = capsys.readouterr()
        hardware = json.loads(printed.out)["hardware"]
        assert (hardware["num_devices"], hardware["device_bytes"]) == (len(devices), 80_000_000_000 if devices else 0)
        assert hardware["host_bytes"] == pytest.approx(host_memory_bytes(), abs=1_000_000)
        assert f"planned for this machine, {shown}, " in " ".join(printed.err.split())
    assert cli.run(["plan", str(model_dir), "w4a16", "--on", "slurm"]) == 1
    assert "--on needs one" in capsys.readouterr().err


LLAMA_405B = Path(__file__).parents[2] / "quantcore" / "configs" / "llama-3.1-405b.json"


@pytest.mark.parametrize("as_json", [True, False])
def test_a_plan_for_hardware_needs_no_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.delenv("BITFOUNDRY_URL")
    command = ["plan", str(LLAMA_405B), "--devices", "8x192GB", "--nodes", "2", "--quant_scheme", "fp8"]
    assert cli.run([*command, *(["--json"] if as_json else [])]) == 0
    said = capsys.readouterr().out
    if as_json:
        assert json.loads(said)["hardware"]["num_ranks"] == 16
    else:
        assert said.startswith("fits 8 x 192.0 GB on each of 2 nodes: streamed")


@pytest.mark.parametrize("flags", [["--host_memory", "1TB", "--config", "fp8"], []])
def test_a_plan_of_the_service_takes_no_flags_of_the_engine(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plan", "/m", *flags]) == 2
    said = capsys.readouterr().err
    assert ("no flag --host_memory" if flags else "choose a preset") in said


def test_a_plan_for_hardware_that_does_not_fit_has_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", str(LLAMA_405B), "--devices", "1x8GB", "--quant_scheme", "fp8"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_config_file_stands_behind_options_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr("bitfoundry.client.service.Client", lambda url, key: seen.append((url, key)))
    file = tmp_path / "config.toml"
    file.write_text('url = "http://file"\napi_key = "bf_file"\n')
    file.chmod(0o600)
    monkeypatch.delenv("BITFOUNDRY_URL")
    monkeypatch.delenv("BITFOUNDRY_API_KEY")
    options.connect("http://option", "bf_option", None)
    with pytest.raises(BitfoundryError, match="needs an API key"):
        options.connect("http://option", None, None)  # the file's key is for the file's service
    options.connect(None, None, None)
    options.connect(None, "bf_option", None)
    assert seen == [("http://option", "bf_option"), ("http://file", "bf_file"), ("http://file", "bf_option")]
    file.chmod(0o640)
    with pytest.raises(BitfoundryError, match="others may read it"):
        options.connect(None, None, None)
    wrong = {"url = 3": "url must be a text", "ulr = ''": "ulr is not a setting", "=": "cannot be read"}
    for content, message in wrong.items():
        file.write_text(content)
        with pytest.raises(BitfoundryError, match=message):
            options.connect(None, None, None)


def test_the_config_file_names_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'home = "{tmp_path}/elsewhere"')
    assert options.find_home(None) == tmp_path
    monkeypatch.delenv("BITFOUNDRY_HOME")
    assert options.find_home(None) == tmp_path / "elsewhere"
    assert options.find_home(tmp_path / "option") == tmp_path / "option"
    monkeypatch.delenv("BITFOUNDRY_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert UserConfig.file() == tmp_path / "bitfoundry" / "config.toml"


def test_shells_can_complete() -> None:
    environment = os.environ | {
        "_BITFOUNDRY_COMPLETE": "complete_bash",
        "COMP_WORDS": "bitfoundry doc",
        "COMP_CWORD": "1",
    }
    program = (
        "import sys; sys.argv = ['bitfoundry']; from bitfoundry.commands.main import app; app(prog_name='bitfoundry')"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["doctor"], done.stderr


def _leaves(command: Any) -> Iterator[Any]:
    """All commands below ``command`` that have no commands of their own."""
    children = getattr(command, "commands", {})
    if not children:
        yield command
    for child in children.values():
        yield from _leaves(child)


def test_each_command_has_its_place_under_one_heading(capsys: pytest.CaptureFixture[str]) -> None:
    placed = [name for names in HEADINGS.values() for name in names]
    assert sorted(placed) == sorted(vars(get_command(cli.app))["commands"])
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [shown.index(heading) for heading in HEADINGS] == sorted(shown.index(heading) for heading in HEADINGS)
    assert "─ Commands" not in shown


def test_the_connection_options_are_the_same_everywhere() -> None:
    names = ("url", "api_key", "home")
    shown = set()
    num_commands = 0
    for command in _leaves(get_command(cli.app)):
        options = {option.name: option for option in command.params}
        if "url" in options:
            num_commands += 1
            assert list(options)[-4:] == [*names, "as_json"], command.name
            shown.add(tuple((options[name].opts[0], options[name].envvar, options[name].help) for name in names))
    assert num_commands > 40
    (connection,) = shown
    assert [flag for flag, _, _ in connection] == ["--url", "--api-key", "--home"]
    assert [variable for _, variable, _ in connection] == ["BITFOUNDRY_URL", "BITFOUNDRY_API_KEY", None]
    assert all(text for _, _, text in connection)
