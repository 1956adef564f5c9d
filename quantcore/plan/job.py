"""The plan of a job: applies ``make_plan`` to a JobSpec and a model's headers. No torch."""

from __future__ import annotations

from quantcore.checkpoint.headers import ModelHeaders
from quantcore.config.job_spec import JobSpec
from quantcore.plan.planner import Plan, make_plan


def plan_job(spec: JobSpec, headers: ModelHeaders, *, num_schemes: int | None = None) -> Plan:
    """Plan a job from a model's headers; see ``make_plan``.

    ``num_schemes``: the number of uniform models that a mix measures first; by default one for each of its schemes.
    """
    if num_schemes is None:
        num_schemes = len(spec.mix.schemes) if spec.mix else 0
    return make_plan(
        spec.config, headers.config, headers.tensors, calibration=spec.calibration, exports=spec.export,
        evaluation=spec.evaluation, file2file=spec.file2file, shard_blocks=spec.shard_blocks,
        warnings=headers.warnings, num_schemes=num_schemes,
    )  # fmt: skip
