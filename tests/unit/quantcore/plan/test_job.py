"""A job's windows fit the model's context where their length was not given."""

from __future__ import annotations

import pytest

from quantcore.config import presets
from quantcore.config.job_spec import Evaluation, JobSpec
from quantcore.config.quantization import CalibrationConfig
from quantcore.plan.job import fitted


def lengths(longest: int | None, **parts: CalibrationConfig | Evaluation) -> tuple[int, int]:
    """The lengths of a job's windows for a model that reads ``longest`` tokens."""
    spec = JobSpec(config=presets.resolve("fp8"), **parts)
    found = fitted(spec, {"max_position_embeddings": longest})
    return found.calibration.seq_len, found.evaluation.seq_len


@pytest.mark.parametrize(("longest", "wanted"), [(256, 256), (512, 512), (8192, 512), (None, 512), (16, 512)])
def test_defaults_are_cut_down_to_the_context(longest: int | None, wanted: int) -> None:
    assert lengths(longest) == (wanted, wanted)
    assert lengths(longest, calibration=CalibrationConfig(num_samples=4)) == (wanted, wanted)


def test_a_length_that_was_given_stays_and_is_judged_by_the_plan() -> None:
    assert lengths(256, calibration=CalibrationConfig(seq_len=512)) == (512, 256)
    assert lengths(256, evaluation=Evaluation(seq_len=512)) == (256, 512)
