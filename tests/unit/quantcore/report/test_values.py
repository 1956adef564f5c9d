"""Reports are typed values: what was written is read and written again unchanged, old reports included."""

import math
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from quantcore.report import schema
from quantcore.report.card import model_card
from quantcore.report.gate_result import GateResult
from quantcore.report.html import page
from quantcore.report.quality import ConsumerCheck, Measure, Perplexity
from quantcore.report.values import Report
from tests.support import reports

ROOT = Path(__file__).parents[4]
RANKS = [{"rank": rank, "peak_memory_bytes": 1, "planned_peak_memory_bytes": 2} for rank in (0, 1)]


def newer() -> dict:
    """A report with the fields that came later."""
    data = reports.report()
    use = {"peak_memory_bytes": 1, "planned_peak_memory_bytes": 2}
    data["summary"] |= {
        "executor": "streamed", "failed_tasks": {"gsm8k": "no"}, "ranks": RANKS,
        "memory_by_phase": {"quantize": use, "verify": use}, "kl_stderr": 0.01,
        "perplexity_ratio_stderr": 0.002,
    }  # fmt: skip
    data["quality"]["by_position"] = [
        {
            "first": 1,
            "last": 16,
            "num_tokens": 192,
            "kl_mean": reports.measure(0.2),
            "top1_agreement": reports.measure(0.8),
        }
    ]
    data["clipping"] = {"down_proj input": 0.0125}
    data["mix"] = None
    data["proof"]["quark"]["consumer_check"] = {"consumer": "Transformers 5", "logit_difference": 0.0, "of_twin": True}
    return data


@pytest.mark.parametrize("data", [reports.report(), newer()], ids=["old", "new"])
def test_a_report_stays_the_same_when_it_is_read_and_written(data):
    report = Report.model_validate(data)
    assert report.to_dict() == data
    assert isinstance(report.to_dict()["summary"]["gates"][0]["limit"], int), "a whole number stays one"
    jsonschema.validate(data, Report.model_json_schema(mode="serialization"))
    assert "<title>tiny, quantized</title>" in page(report) and "# tiny, quantized" in model_card(report, Path("/"))


def test_fields_of_a_later_version_are_ignored():
    assert Report.model_validate(reports.report() | {"later": 1}).to_dict() == reports.report()


@pytest.mark.parametrize("field", ["summary", "quality", "provenance"])
def test_a_report_is_whole(field):
    data = reports.report()
    del data[field]
    with pytest.raises(ValidationError):
        Report.model_validate(data)


def test_a_report_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        Report.model_validate(reports.report()).summary.gate = "off"


def test_numbers_beyond_all_numbers_stay_in_json():
    assert Measure(value=math.inf, stderr=None).to_dict() == {"value": math.inf, "stderr": None}


def test_values_as_text():
    assert str(Measure(value=12.3456789, stderr=0.0512)) == "12.35 (12.2 to 12.5)"
    assert str(Measure(value=None, stderr=None)) == "–"
    assert str(Perplexity(value=12.3456789, stderr=0.0512)) == "12.35 (12.2 to 12.5)"
    assert str(Perplexity(value=3.0, stderr=2.0)) == "3.0 (1 to 12)"  # 3 / exp(1.31) is below 1, which none is
    assert str(Perplexity(value=70.0, stderr=60.0)) == "70.0 (13 to 376)"  # 70 - 1.96 * 60 is below 0
    assert str(ConsumerCheck(not_checked="No.")) == "not read by another program: No."
    check = ConsumerCheck(consumer="Transformers 5", logit_difference=0.0012)
    assert str(check) == "Transformers 5 reads the files; its logits differ by 1.2e-03 of their norm."
    assert "small twin" in str(check.replace(of_twin=True))


def missed(name, value, limit, detail="between 0.59 and 0.62"):
    return GateResult(gate="G8", name=name, status="fail", value=value, limit=limit, detail=detail).sentence


def test_a_missed_limit_is_a_sentence():
    assert missed("top1_agreement", 0.6018518518518519, 0.85) == (
        "Top-1 agreement 60.2 % is below the 85 % limit (between 0.59 and 0.62)."
    )
    assert (
        missed("layer_sqnr_db", 3.0, 26.0)
        == "Lowest SQNR of a weight 3 dB is below the 26 dB limit (between 0.59 and 0.62)."
    )
    assert missed("kl_mean", 0.5, 0.035, "x") == "Mean KL divergence 0.5 is above the 0.035 limit (x)."
    assert missed("perplexity_ratio", math.nan, 2.7).startswith("Perplexity ratio is not a number")
    assert missed("perplexity_ratio", None, 2.7).startswith("Perplexity ratio is not a number")


def test_the_schema_is_that_of_the_types():
    assert (ROOT / "docs/report.schema.json").read_text() == schema.document(), "run `make openapi`"
