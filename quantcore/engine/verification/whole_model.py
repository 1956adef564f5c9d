"""What is measured with a model as a whole in memory, where that is allowed: answers, samples and tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantcore.config.task import Task
from quantcore.data.prompts import read_prompt_set
from quantcore.engine.data.tokenizer import load_tokenizer
from quantcore.engine.evaluation import harness
from quantcore.engine.evaluation.behaviour import compare_behaviour
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.engine.evaluation.own_answers import compare_own_answers, prompts_of
from quantcore.engine.evaluation.samples import compare_samples
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.model.kinds import Kind
from quantcore.engine.runtime.devices import default_device, free_memory_bytes
from quantcore.errors import reason_of
from quantcore.events import Emit, Warned
from quantcore.plan.planner import Plan

FREE_PARTS = 8
"""A whole model may take 1/8 of the free memory of an accelerator: other jobs may run there as well."""


def run_whole(
    task: Task, plan: Plan, pair: ModelPair, text: EvaluationText, folder: Path, emit: Emit
) -> dict[str, Any]:
    """Return the fields of a Proof for which a model is in memory as a whole: answers, samples and tasks.

    ``folder`` is that of the result. Warn about what fails or is left out.
    """
    evaluation, kind = task.evaluation, pair.original.streamed.kind
    found: dict[str, Any] = {}
    arguments = {**task.calibration.chat_template_kwargs, **evaluation.chat_template_kwargs}
    if evaluation.num_answers and kind is Kind.causal:
        if may_be_whole(plan, plan.allows_whole):
            with failure_as_warning("answers_failed", "Comparing own answers", emit):
                answers = compare_own_answers(task.model_folder, arguments, prompts_of(evaluation), pair, emit)
                found["answers"] = answers
        elif load_tokenizer(task.model_folder).chat_template:
            emit(Warned("answers_left_out", why_not_whole(plan, "The model's own answers were not measured")))
    if evaluation.num_behaviour_prompts:
        found |= _behaviour(task, plan, pair, folder, emit)
    if evaluation.num_prompts and kind is not Kind.causal:
        emit(
            Warned("samples_left_out", "No sample texts were generated: only causal language models can generate text.")
        )
    elif evaluation.num_prompts and may_be_whole(plan, plan.allows_whole):
        with failure_as_warning("samples_failed", "Generating sample texts", emit):
            samples = compare_samples(task.model_folder, arguments, text, evaluation.num_prompts, pair, emit)
            found["samples"] = samples
    elif evaluation.num_prompts:
        emit(Warned("samples_left_out", why_not_whole(plan, "No sample texts were generated")))
    if evaluation.tasks:
        with failure_as_warning("tasks_failed", "Running the tasks", emit) as failure:
            tokenizer = load_tokenizer(task.model_folder)
            results = harness.compare(evaluation, tokenizer, pair)
            found["harness"] = results
        if failure:
            found |= {"harness": {}, "failed_tasks": dict.fromkeys(evaluation.tasks, failure[0])}
    return found


def _behaviour(task: Task, plan: Plan, pair: ModelPair, folder: Path, emit: Emit) -> dict[str, Any]:
    """Return ``behaviour``, or warn about why it was not measured."""
    if not may_be_whole(plan, plan.allows_whole):
        emit(Warned("behaviour_left_out", why_not_whole(plan, "The model's behaviour was not measured")))
        return {}
    if pair.original.streamed.kind is not Kind.causal:
        emit(Warned("behaviour_left_out", "Behaviour was not measured: only causal language models answer prompts."))
        return {}
    evaluation, found = task.evaluation, {}
    arguments = {**task.calibration.chat_template_kwargs, **evaluation.chat_template_kwargs}
    with failure_as_warning("behaviour_failed", "Comparing behaviour", emit):
        prompts = read_prompt_set(evaluation.prompts, evaluation.num_behaviour_prompts)
        folders = task.model_folder, folder
        behaviour = compare_behaviour(folders, arguments, prompts, evaluation.behaviour_len, pair, emit)
        found["behaviour"] = behaviour
    return found


@contextmanager
def failure_as_warning(code: str, what: str, emit: Emit) -> Iterator[list[str]]:
    """Turn a failure of foreign code into a warning, since the artifact is proven already and is kept.

    The yielded list then holds the reason.
    """
    reasons: list[str] = []
    try:
        yield reasons
    except Exception as error:
        reasons.append(reason_of(error))
        emit(Warned(code, f"{what} failed: {reasons[0]}."))


def may_be_whole(plan: Plan, is_planned: bool) -> bool:
    """Return True if the whole model fits: the plan counts on it and the memory is free.

    The plan does not count the memory of an accelerator; there the model may take a small part of what is free.
    """
    device = default_device()
    if device.type != "cpu":
        return plan.float_bytes <= free_memory_bytes(device) // FREE_PARTS
    return is_planned and plan.float_bytes <= free_memory_bytes(device)


def why_not_whole(plan: Plan, what: str) -> str:
    """Explain why ``what`` was left out: the whole model is not in memory."""
    size = f"{plan.float_bytes / 1e9:.1f} GB"
    if plan.allows_whole:
        return f"{what}: that needs the whole model in memory ({size}), but less is free."
    return (
        f"{what}: that needs the whole model in memory ({size}), but this job was planned with less. `bitfoundry "
        "evaluate` does it on a machine with more memory."
    )
