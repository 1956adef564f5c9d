"""Our engine: ``python -m bench.engines.ours JOB``.

The clock runs from the start of a task until its quantize phase ends: it includes reading the model and writing the
files, both of which happen block by block. Perplexity is that of the files: they are decoded into a plain Transformers
model, whose inputs are quantized on the way where the scheme says so, and given to the same function as the peers' are.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from bench.engines.runner import Clock, Job, finish, quality, start
from quantcore.checkpoint.headers import read_local
from quantcore.config import presets
from quantcore.config.job_spec import JobSpec
from quantcore.config.quantization import CalibrationConfig, Config, parse_config
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.calibration.ranges import quantized_activations
from quantcore.engine.data.windows import TokenWindows
from quantcore.engine.pipeline import job as pipeline
from quantcore.engine.solvers import SOLVERS, TUNERS
from quantcore.engine.transforms import SMOOTHINGS
from quantcore.engine.verification.verify import WrittenCheckpoint
from quantcore.events import Event, PhaseStarted
from quantcore.export import EXPORTERS
from quantcore.plan.planner import export_dir, make_plan

PRESETS = {
    "uint4": "w4a16", "int4": "w4a16_sym", "uint3": "w3a16", "uint2": "w2a16", "int8": "int8_static",
    "int8_dynamic": "int8_dynamic", "fp8": "fp8", "fp8_kv": "fp8", "mxfp4": "mxfp4",
}  # fmt: skip
STEPS: dict[str, dict[str, Any]] = {
    "range_search": {"name": "rtn"},
    "smoothquant": {"name": "smoothquant"},
    "awq": {"name": "awq"},
    "gptq": {"name": "gptq"},
    "gptaq": {"name": "gptaq"},
    "yaqa": {"name": "yaqa"},
    "rotation": {"name": "rotation"},
    "distill": {"name": "distill"},
    "autoround": {"name": "autoround"},
}
EXPORT = "quark"
OTHER_EXPORTS = {"uint3": "gptq_v2", "uint2": "gptq_v2"}
"""Where that format has no place for the codes."""
NOTES = {"int8_dynamic": "inputs are asymmetric"}


def config_for(job: Job) -> Config:
    """Return the preset of the scheme with the algorithm's steps. Raises RuntimeError for a missing step."""
    available = {*SOLVERS, *TUNERS, *SMOOTHINGS, "rotation", "distill"}
    if lacking := {STEPS[step]["name"] for step in job.algorithms} - available:
        raise RuntimeError(f"the engine has no {', '.join(lacking)} yet")
    config = presets.resolve(PRESETS[job.scheme], kv_cache="fp8" if job.scheme == "fp8_kv" else None).to_dict()
    return parse_config({**config, "algo_config": [STEPS[step] for step in job.algorithms]})


def read_back(task: Task, export: str, stack: ExitStack) -> torch.nn.Module:
    """Load the files into a Transformers model, whose inputs are quantized until ``stack`` is closed."""
    headers = read_local(task.model_folder)
    plan = make_plan(JobSpec(config=task.config, calibration=task.calibration, export=task.export), headers)
    folder = export_dir(task.output_dir, plan, export)
    written = WrittenCheckpoint(plan, folder, export, headers)
    weights = {f"{layer.name}.weight": written.read_float(f"{layer.name}.weight") for layer in plan.layers}
    quantized = tuple(f"{layer.name}." for layer in plan.layers)
    state = {**weights, **{name: tensor for name, tensor in _tensors(folder) if not name.startswith(quantized)}}
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise RuntimeError(f"the files hold another model: missing {missing}, unexpected {unexpected}")
    modules = {layer: model.get_submodule(layer.name) for layer in plan.layers}
    stack.enter_context(quantized_activations(modules, written.activations, model))
    return model


def _tensors(folder: Path) -> list[tuple[str, torch.Tensor]]:
    entries = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            entries += [(name, tensors.get_tensor(name)) for name in tensors.keys()]  # noqa: SIM118  # it is no mapping
    return entries


def fake_quantized_differs(task: Task, model: torch.nn.Module) -> list[str]:
    """Return the tensors in which the fake-quantized export, loaded by plain Transformers, differs from ``model``."""
    folder = task.output_dir / "fake_quantized"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    return [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, plain[name])]


def main() -> None:
    job = start()
    calibration_NT, held_out_NT = job.token_windows()
    # A second export as a check, except where writing it would be most of the time that is measured.
    export = OTHER_EXPORTS.get(job.scheme, EXPORT)
    exports = (export, *(name for name in ("fake_quantized",) if name in EXPORTERS and job.algorithms))
    num_samples, seq_len = calibration_NT.shape
    task = Task(
        model_dir=job.model_dir, output_dir=job.scratch / "model", config=config_for(job), export=exports,
        calibration=CalibrationConfig(num_samples=num_samples, seq_len=seq_len),
        evaluation=EvaluationConfig(num_windows=0),
    )  # fmt: skip
    note = NOTES.get(job.scheme, "")
    if task.config.distills is not None:
        more_NT = job.more_windows()
        note = f"{len(more_NT)} more windows, to tune scales and to see whether that gained"
        calibration_NT = torch.cat([calibration_NT, more_NT])
    # The tokens that the peers get. Like them, the engine needs no time and memory for a tokenizer.
    pipeline.read_windows = lambda _: TokenWindows(calibration_NT, held_out_NT[: pipeline.NUM_PROBES])
    clock = Clock()

    def emit(event: Event) -> None:
        if isinstance(event, PhaseStarted) and event.phase == "export":
            clock.__exit__()

    with Clock() as everything:
        clock.__enter__()
        report = pipeline.run(task, emit)
    assert report is not None
    with ExitStack() as stack, Clock() as evaluate:
        model = read_back(task, export, stack)
        found = quality(model, job)
    more = {"fake_quantized_differs": fake_quantized_differs(task, model)} if len(exports) > 1 else {}
    finish(
        job, quantize=clock, evaluate=evaluate, quality=found, packages=["bitfoundry"],
        note=note,
        settings={"preset": PRESETS[job.scheme], "algo_config": [STEPS[step] for step in job.algorithms]},
        total=everything.seen, warnings=report.warnings, **more,
    )  # fmt: skip


if __name__ == "__main__":
    main()
