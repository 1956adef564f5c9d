"""`bitfoundry selftest` on the simulated accelerator: it agrees with the CPU, and says where it does not."""

import json
from itertools import groupby

import pytest
import torch

from quantcore.cli.main import main
from quantcore.engine.selftest import run, speeds, trial_job
from quantcore.engine.selftest.parts import parts
from quantcore.formats.floats import FloatFormat
from tests.support.accelerator import SimTensor, on_accelerator
from tests.support.accelerator_jobs import as_on_accelerators, proofs_in_forks

LONG = ("range search", "gptaq")
"""Groups of many launches. What they call is called by GPTQ as well."""


def reported(file):
    report = json.loads(file.read_text("utf-8"))
    return report, {f"{check['group']} {check['name']}": check for check in report["checks"]}


@pytest.fixture(autouse=True)
def sizes_of_the_cpu(monkeypatch):
    """Speeds are measured on what a CPU can compute: without instructions for bfloat16, a GPU's share takes minutes."""
    monkeypatch.setattr(speeds, "ON_DEVICE", speeds.ON_CPU)


@pytest.fixture
def few_parts(monkeypatch):
    """One part of most groups, and no job."""
    few = [next(group) for name, group in groupby(parts(), lambda part: part.group) if name not in LONG]
    monkeypatch.setattr(run, "todo", lambda: few)


def selftest(*arguments):
    """The exit status on the simulated device."""

    def work(counts):
        with as_on_accelerators(), proofs_in_forks():
            return main(["selftest", *map(str, arguments)]), counts.launches.total()

    status, launches = on_accelerator(work)
    assert launches > 10, "it ran on the device"
    return status


@pytest.mark.slow
def test_all_agrees_with_the_cpu(tmp_path):
    """The arithmetic is the same, so codes and float32 numbers are, too; not those of attention in bfloat16."""
    assert selftest("--report", tmp_path / "report.json") == 0
    report, checks = reported(tmp_path / "report.json")
    assert report["agreed"] and report["device"]["type"] == "sim" and report["device"]["memory_bytes"] > 0
    assert len(checks) > 40 and {check["beside"] for check in checks.values()} == {"the CPU"}
    whole_job = checks.pop(f"job {run.SOLVED} with GPTQ")["difference"]
    assert whole_job["num_codes"] > 100_000 and whole_job["share"] < 0.02
    assert {check["difference"]["largest"] or 0 for check in checks.values()} == {0}
    assert {check["difference"]["share"] or 0 for check in checks.values()} == {0}


def test_one_part_of_each_group_agrees_with_the_cpu(few_parts, tmp_path):
    assert selftest("--report", tmp_path / "report.json") == 0
    report, checks = reported(tmp_path / "report.json")
    assert report["agreed"] and len(checks) == 7
    work = {"products of the model", "statistics", "GPTQ", "copies to the device", "digests"}
    assert {one["name"] for one in report["speeds"] if one["seconds"] > 0 < one["planned_s"]} == work
    assert all(check["verdict"] == "agreed" and check["device_s"] > 0 < check["beside_s"] for check in checks.values())


def test_another_rounding_on_the_device_is_found(monkeypatch, tmp_path):
    plain = FloatFormat.encode

    def one_more(self, x, *rest):
        codes = plain(self, x, *rest)
        return codes ^ 1 if isinstance(x, SimTensor) else codes

    [fp4] = [part for part in parts() if part.name == "fp4"]
    monkeypatch.setattr(run, "todo", lambda: [fp4])
    monkeypatch.setattr(FloatFormat, "encode", one_more)
    assert selftest("--report", tmp_path / "report.json") == 1
    report, checks = reported(tmp_path / "report.json")
    assert not report["agreed"]
    assert [name for name, check in checks.items() if check["verdict"] == "differs"] == ["rounding fp4"]
    assert checks["rounding fp4"]["difference"]["share"] == 1


def test_what_a_device_cannot_do_is_found(few_parts, monkeypatch, tmp_path):
    plain = torch.linalg.cholesky_ex

    def not_here(x, **options):
        if isinstance(x, SimTensor):
            raise NotImplementedError(f"cholesky_ex is not implemented for {x.device} ({__file__})")
        return plain(x, **options)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", not_here)
    assert selftest("--report", tmp_path / "report.json") == 1
    _, checks = reported(tmp_path / "report.json")
    failed = [name for name, check in checks.items() if check["verdict"] == "failed"]
    assert failed == ["gptq w4a16"]
    error = "NotImplementedError: cholesky_ex is not implemented for sim:0 (test_selftest.py)"
    assert checks["gptq w4a16"]["error"] == error, "no folder of this machine"


@pytest.mark.slow
def test_a_job_that_keeps_nothing_of_gptq_is_found(monkeypatch, tmp_path):
    """Without calibration on the device its codes are those of plain rounding."""
    from quantcore.engine.solvers.gptq import GPTQ

    plain = GPTQ.solve

    def without_data(self, weights, stats, *rest):
        return plain(self, weights, None if isinstance(next(iter(weights.values())), SimTensor) else stats, *rest)

    monkeypatch.setattr(GPTQ, "solve", without_data)
    monkeypatch.setattr(run, "todo", lambda: [run.JOB])
    assert selftest("--report", tmp_path / "report.json") == 1
    _, checks = reported(tmp_path / "report.json")
    [check] = checks.values()
    assert check["verdict"] == "differs" and check["difference"]["share"] > trial_job.ALLOWED.share


def test_a_device_that_is_not_there_is_refused(capfd):
    def work(counts):
        return main(["selftest", "--device", "cuda"])

    assert on_accelerator(work) == 1
    assert "Unknown device 'cuda'" in (said := capfd.readouterr().err) and "Available: cpu, sim, sim:0." in said
