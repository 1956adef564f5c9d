"""`bitfoundry selftest` on the CPU alone: its table, its report and its exit status."""

import json

import pytest
import torch

from quantcore.cli import selftest_command
from quantcore.cli.main import main
from quantcore.engine.selftest import run
from quantcore.engine.selftest.parts import EXACT, Computed, Part
from quantcore.engine.selftest.values import Check, Difference, Selftest, Speed


def part(group, code, name="one"):
    return Part(
        group, name, EXACT, lambda device: Computed(torch.tensor([1, code])), lambda: Computed(torch.tensor([1, 2]))
    )


@pytest.fixture
def parts(monkeypatch):
    def parts(*given):
        monkeypatch.setattr(run, "todo", lambda: list(given))

    return parts


def test_agreement_is_shown_and_reported(parts, capsys, tmp_path):
    parts(part("rounding", 2), part("rounding", 2), part("packing", 2))
    assert main(["selftest", "--report", str(tmp_path / "report.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rounding 2 0 %" in said and "packing 1 0 %" in said
    assert "The CPU alone was checked" in said and "agreed after 0 s" in said
    report = (tmp_path / "report.json").read_text("utf-8")
    assert Selftest.model_validate_json(report).agreed and str(tmp_path) not in report


def test_differences_are_named(parts, capsys):
    parts(part("rounding", 2), *(part("packing", 3, f"{number} bits") for number in range(10)))
    assert main(["selftest"]) == 1
    said = capsys.readouterr().out
    assert "differs packing 0 bits: 50 % of 2 codes (allowed: 0 %). Each number is rounded separately" in said
    assert said.count("differs packing") == selftest_command.MAX_SHOWN and "... and 2 more" in said
    assert "differs after" in said and "agreed after" not in said


def test_the_report_can_be_printed(parts, capsys):
    parts(part("rounding", 3))
    assert main(["selftest", "--device", "cpu", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["agreed"]) == (1, False)
    assert report["checks"][0]["difference"] == {"num_codes": 2, "share": 0.5, "largest": None}


def test_a_device_is_compared_with_the_cpu(capsys):
    check = Check(
        group="rounding",
        name="int8",
        verdict="failed",
        allowed=EXACT,
        beside="the CPU",
        error="RuntimeError: no kernel",
    )
    done = check.replace(
        verdict="agreed", difference=Difference(num_codes=9, share=0, largest=0), device_s=2, beside_s=1
    )
    selftest_command.show(
        Selftest(
            schema_version=1, agreed=False, device={"type": "cuda", "name": "A GPU"}, num_threads=8, environment={},
            seconds=61.2, checks=(check, done),
            speeds=(
                Speed(name="statistics", amount=4e12, unit="FLOP", seconds=0.01, planned_s=0.02),
                Speed(name="digests", amount=4e9, unit="B", seconds=2, planned_s=1),
            ),
        )
    )  # fmt: skip
    said = " ".join(capsys.readouterr().out.split())
    assert "cuda CPU rounding 2 0 % 0.0e+00 2.000 s 1.000 s" in said
    assert "statistics 400 TFLOP/s 200 TFLOP/s digests 2 GB/s 4 GB/s" in said
    assert "failed rounding int8: RuntimeError: no kernel" in said
    assert "A GPU was compared with the CPU (8 threads). differs after 61 s" in said


def test_a_device_that_is_not_there_is_refused(capsys):
    assert main(["selftest", "--device", "cuda"]) == 1
    said = capsys.readouterr().err
    assert "Unknown device 'cuda'" in said and "Available: cpu." in said


def test_a_report_replaces_no_file(tmp_path, capsys):
    (tmp_path / "report.json").touch()
    with pytest.raises(SystemExit):
        main(["selftest", "--report", str(tmp_path / "report.json")])
    assert "exists already" in capsys.readouterr().err
