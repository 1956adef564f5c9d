"""The index of local runs: names, removed folders, commands that end at the same time."""

import json
import multiprocessing
import shutil

import pytest

from quantcore.report import local_runs
from quantcore.report.values import Report
from tests.support.reports import report

REPORT = Report.model_validate(report(size=19000))


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("BITFOUNDRY_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def recorded(tmp_path, name, config="w4a16"):
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "MANIFEST.json").write_text("{}")
    return local_runs.record(folder, REPORT, config, ("bitfoundry", "quantize", "model", config, "-o", name))


def test_a_run_is_found_by_id_start_name_and_last(tmp_path):
    one, two = recorded(tmp_path, "one"), recorded(tmp_path, "two", "fp8")
    assert local_runs.runs() == [two, one]
    assert (one.name, two.config, one.size_bytes) == ("one", "fp8", 19000)
    for run in (one, two):
        for name in (run.id, run.id[:12], run.id.removeprefix("run_")[:8], run.name):
            assert local_runs.find(name) == [run]
    assert local_runs.find("last") == [two]
    assert local_runs.of_folder(tmp_path / "one") == one and local_runs.of_folder(tmp_path) is None
    assert one.command == ("bitfoundry", "quantize", "model", "w4a16", "-o", "one")
    assert local_runs.find("three") == local_runs.find("") == local_runs.find("run_") == []


def test_names_may_belong_to_several(tmp_path):
    (tmp_path / "a").mkdir()
    first, second = recorded(tmp_path, "out"), recorded(tmp_path / "a", "out")
    assert local_runs.find("out") == [second, first]


def test_a_removed_folder_is_not_shown_and_is_dropped_by_the_next_run(tmp_path, data):
    recorded(tmp_path, "one")
    two = recorded(tmp_path, "two")
    shutil.rmtree(tmp_path / "one")
    assert local_runs.runs() == [two]
    again = recorded(tmp_path, "two")
    assert local_runs.runs() == [again] and again.id != two.id
    assert len((data / "runs.jsonl").read_text().splitlines()) == 1


def test_a_line_that_cannot_be_read_is_left_out(tmp_path, data):
    one = recorded(tmp_path, "one")
    with (data / "runs.jsonl").open("a") as file:
        file.write('{"id": "run_of_another_version"}\n{"id": "cut o')
    assert local_runs.runs() == [one]
    assert json.loads((data / "runs.jsonl").read_text().splitlines()[0])["id"] == one.id


def _record_some(tmp_path, number):
    for count in range(5):
        recorded(tmp_path, f"{number}-{count}")


def test_commands_that_end_at_the_same_time_lose_no_run(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_record_some, args=(tmp_path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(local_runs.runs()) == 20
