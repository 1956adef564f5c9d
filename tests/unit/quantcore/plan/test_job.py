"""A plan of a job, a job without some layers, and windows that fit the model's context."""

import pytest

from quantcore.checkpoint.headers import ModelHeaders, read_local
from quantcore.config import presets
from quantcore.config.goal import Goal
from quantcore.config.job_spec import NO_SCHEME, Evaluation, JobSpec, MixConfig
from quantcore.config.quantization import CalibrationConfig, Config
from quantcore.plan.job import with_model_defaults, without_layers
from quantcore.plan.mix_schemes import resolve
from quantcore.plan.planner import make_plan
from tests.support.models import tiny_model

SHORT = CalibrationConfig(seq_len=64)


def headers_of(folder) -> ModelHeaders:
    return read_local(tiny_model(folder))


def test_planned_layers_are_excluded_by_name_and_shown_by_pattern(tmp_path):
    headers, spec = headers_of(tmp_path), JobSpec(config=presets.resolve("int8_dynamic"), calibration=SHORT)
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head", "no.layer"]
    less, patterns = without_layers(spec, headers, names)
    assert patterns == ["model.layers.*.mlp.up_proj"]  # lm_head is excluded already
    assert less.config.exclude == (*spec.config.exclude, *names[:2])
    kept = {tensor.name: tensor.reason for tensor in make_plan(less, headers).kept}
    assert kept["model.layers.1.mlp.up_proj"] == "excluded by 'model.layers.1.mlp.up_proj'"
    assert without_layers(spec, headers, []) == (spec, [])


def test_a_mix_keeps_all_its_layers(tmp_path):
    headers = headers_of(tmp_path)
    mix = resolve(MixConfig(schemes=("w4a16", "fp8"), max_bits=5))
    mixed = JobSpec(config=Config(NO_SCHEME), mix=mix, calibration=SHORT)
    assert without_layers(mixed, headers, ["model.layers.0.mlp.up_proj"]) == (mixed, [])


def test_a_job_that_names_no_format_gets_the_default_of_its_schemes() -> None:
    w4 = JobSpec(config=presets.resolve("w4a16"))
    mix = resolve(MixConfig(schemes=("w4a16", "int8_weight_only"), max_bits=6))
    assert with_model_defaults(w4, {}).export == ("awq",)
    assert with_model_defaults(JobSpec(config=Config(NO_SCHEME), mix=mix), {}).export == ("compressed_tensors",)
    assert with_model_defaults(w4.model_copy(update={"export": ("gptq_v2",)}), {}).export == ("gptq_v2",)
    goal = JobSpec(config=Config(NO_SCHEME), goal=Goal(runtime="vllm", device="24GB"))
    assert with_model_defaults(goal, {}).export == ()  # the goal chooses


def lengths(longest: int | None, **parts: CalibrationConfig | Evaluation) -> tuple[int, int]:
    """The lengths of a job's windows for a model that reads ``longest`` tokens."""
    spec = JobSpec(config=presets.resolve("fp8"), **parts)
    found = with_model_defaults(spec, {"max_position_embeddings": longest})
    return found.calibration.seq_len, found.evaluation.seq_len


@pytest.mark.parametrize(("longest", "wanted"), [(256, 256), (512, 512), (8192, 512), (None, 512), (16, 512)])
def test_defaults_are_cut_down_to_the_context(longest: int | None, wanted: int) -> None:
    assert lengths(longest) == (wanted, wanted)
    assert lengths(longest, calibration=CalibrationConfig(num_samples=4)) == (wanted, wanted)


def test_a_length_that_was_given_stays_and_is_judged_by_the_plan() -> None:
    assert lengths(256, calibration=CalibrationConfig(seq_len=512)) == (512, 256)
    assert lengths(256, evaluation=Evaluation(seq_len=512)) == (256, 512)
