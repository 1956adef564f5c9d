"""A result is found by its id, the start of it, its name, `last` or its folder: of a local run, or of a job."""

import json
from pathlib import Path
from typing import Any

import pytest

from bitfoundry.client.answers import Job
from bitfoundry.commands import main as cli
from bitfoundry.commands import results
from bitfoundry.errors import ApiError, BitfoundryError
from quantcore.cli import evaluate_command
from quantcore.cli import main as engine
from quantcore.cli.inputs import path_of
from quantcore.report import local_runs
from quantcore.report.values import Report
from tests.support.reports import report

JOB = Job(
    id="job_" + 32 * "a", state="succeeded", name="nightly", priority=5, pinned=False, attempt=1,
    cancel_requested=False, model={"path": "/m"}, config={}, preset="fp8", created_at="2020-01-01T00:00:00Z",
    artifact={"path": "/nowhere/on/the/server", "manifest_sha256": "0", "bytes": 1},
)  # fmt: skip


class FakeClient:
    jobs: tuple[Job, ...] = (JOB,)
    is_up = True
    downloaded: list[tuple[str, Path]]

    def __init__(self, url: str, key: str) -> None:
        type(self).downloaded = []

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *raised: object) -> None: ...
    def close(self) -> None: ...

    def find(self, name: str) -> Job:
        if not self.is_up:
            raise ApiError(0, {"code": "no_answer"})
        found = [job for job in self.jobs if name in (job.id, job.id[:8], job.name, "last")]
        if not found:
            raise BitfoundryError("none", code="job_not_found")
        return found[0]

    def list(self, **_: Any) -> Any:
        return iter(self.jobs)

    def download(self, job_id: str, folder: Path) -> Path:
        self.downloaded.append((job_id, folder))
        return folder


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    monkeypatch.setattr("bitfoundry.client.service.Client", FakeClient)
    monkeypatch.setenv("BITFOUNDRY_URL", "http://service")
    monkeypatch.setenv("BITFOUNDRY_API_KEY", "bf_key")
    return FakeClient


@pytest.fixture(autouse=True)
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> local_runs.LocalRun:
    """The only local run, called `mine`."""
    monkeypatch.setenv("BITFOUNDRY_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("BITFOUNDRY_CONFIG", str(tmp_path / "config.toml"))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "MANIFEST.json").write_text("{}")
    (folder / "report.json").write_text(json.dumps(report()))
    return local_runs.record(folder, Report.model_validate(report()), "w4a16")


def test_a_local_run_and_a_job_are_found_by_their_names(run: local_runs.LocalRun, service: type[FakeClient]) -> None:
    client: Any = service("", "")
    assert [results.find_result(name, client) for name in ("mine", run.id, run.id[:10], "last")] == [run] * 4
    assert [results.find_result(name, client) for name in ("nightly", JOB.id, "job_aaaa")] == [JOB] * 3
    assert results.find_result("last", None) == run
    for name, code in (("none", "job_not_found"), ("", "job_not_found")):
        with pytest.raises(BitfoundryError) as refusal:
            results.find_result(name, client)
        assert refusal.value.code == code


def test_a_name_of_both_is_refused_with_the_candidates(
    run: local_runs.LocalRun, service: type[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "jobs", (JOB.model_copy(update={"name": "mine"}),))
    client: Any = service("", "")
    with pytest.raises(BitfoundryError, match=f"fits 2 of them: {run.id[:12]}.*job_aaaa") as refusal:
        results.find_result("mine", client)
    assert refusal.value.code == "job_not_unique"


def test_the_files_of_a_job_are_found_or_downloaded(
    run: local_runs.LocalRun, service: type[FakeClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results.find_folder("mine") == Path(run.folder) and service.downloaded == []
    assert results.find_folder("nightly") == tmp_path / "cache" / "bitfoundry" / "jobs" / JOB.id
    assert service.downloaded == [(JOB.id, tmp_path / "cache" / "bitfoundry" / "jobs" / JOB.id)]
    here = JOB.model_copy(update={"artifact": JOB.artifact.model_copy(update={"path": run.folder})})  # type: ignore[union-attr]
    monkeypatch.setattr(service, "jobs", (here,))
    assert results.find_folder("nightly") == Path(run.folder) and service.downloaded == []
    monkeypatch.setattr(service, "jobs", (JOB.model_copy(update={"artifact": None, "state": "running"}),))
    with pytest.raises(BitfoundryError, match="has no files: it is running"):
        results.find_folder("nightly")


def test_a_name_that_is_none_stands_for_itself(service: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    assert results.find_folder("nowhere") is None and path_of("nowhere", results.find_folder) == "nowhere"
    monkeypatch.setattr(service, "is_up", False)
    assert results.find_folder("nowhere") is None
    assert path_of("org/name", pytest.fail) == "org/name" and path_of("/", pytest.fail) == "/"


def test_without_a_service_there_are_local_runs(run: local_runs.LocalRun) -> None:
    assert results.find_folder("last") == Path(run.folder)


@pytest.mark.parametrize(
    "line", [["chat", "mine"], ["evaluate", "mine"], ["speed", "mine"], ["compare", "mine,last", "last"]]
)
def test_commands_get_the_folder(line: list[str], run: local_runs.LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("quantcore.cli.chat.run", lambda options: seen.append(options.model_dir) or 0)
    for module in (engine, evaluate_command):
        monkeypatch.setattr(module, "shown", lambda work, _: seen.append(_closed_over(work)) or 0)
    monkeypatch.setattr("quantcore.report.compare.compare", lambda folders: seen.extend(folders))
    monkeypatch.setattr("quantcore.cli.console.show_comparison", lambda _: None)
    assert cli.run(line) == 0
    expected = [f"{run.folder},{run.folder}", run.folder] if line[0] == "compare" else [run.folder]
    assert seen == expected


def _closed_over(work: Any) -> str:
    cells = dict(zip(work.__code__.co_freevars, work.__closure__, strict=True))
    return str(cells["options"].cell_contents.model_dir)


def test_a_report_is_read_by_any_name(
    run: local_runs.LocalRun, service: type[FakeClient], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of a local run as of a job; one that runs, or that failed, has none."""
    for name in ("mine", run.id, run.folder):
        assert cli.run(["explain", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["layers"]
    for state, said in (("running", "is running"), ("failed", "did not succeed")):
        monkeypatch.setattr(service, "jobs", (JOB.model_copy(update={"state": state, "name": "nightly"}),))
        assert cli.run(["explain", "nightly"]) == 1
        assert said in capsys.readouterr().err


def test_list_and_show_have_both(
    run: local_runs.LocalRun, service: type[FakeClient], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["list", "--json"]) == 0
    job, local = json.loads(capsys.readouterr().out)
    assert (job["id"], local["id"], local["is_local"]) == (JOB.id, run.id, True)
    assert cli.run(["list"]) == 0
    said = capsys.readouterr().out
    assert said.index("nightly") < said.index("runs of this machine") < said.index(run.id[:12])
    assert cli.run(["list", "--state", "succeeded", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    for name in ("mine", run.folder, run.id):
        assert cli.run(["show", name]) == 0
        assert f"LLM('{run.folder}')" in capsys.readouterr().out
    assert cli.run(["show", "nightly"]) == 0
    assert JOB.id in capsys.readouterr().out
    assert cli.run(["show", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["size_after_bytes"] == run.size_bytes


def test_a_local_run_shows_the_commands_of_its_advice(
    run: local_runs.LocalRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They work one after the other where they are copied to: with the first one's paths, and where it was given."""
    step = {"text": "Use effort best.", "changes": {"effort": "best"}, "flags": "--effort best"}
    poor = report()
    other = {"text": "Use gptaq.", "changes": {"config": {}}, "flags": "--quant_algo gptaq"}
    poor["summary"]["verdict"] = {"level": "broken", "reason": "far", "sentence": "No.", "steps": [other, step]}
    (Path(run.folder) / "report.json").write_text(json.dumps(poor))
    monkeypatch.chdir(tmp_path)
    made = local_runs.record(
        Path(run.folder), Report.model_validate(poor), "w4a16", ("bitfoundry", "quantize", "m", "w4a16", "-o", "mine")
    )
    again = f"bitfoundry quantize m w4a16 --effort best -o {run.folder}-3"
    for folder, prefix in ((tmp_path, ""), (tmp_path / "data", f"cd {tmp_path} && ")):
        monkeypatch.chdir(folder)
        for name in (made.id, run.folder):
            assert cli.run(["show", name]) == 0
            assert capsys.readouterr().out.rstrip().endswith(f"\n  {prefix}{again}")


def test_list_without_a_service_is_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["list"]) == 0
    assert "mine" in capsys.readouterr().out
    assert cli.run(["list", "--text", "zzz"]) == 0
    assert "No matching jobs or runs" in capsys.readouterr().out
