"""Runs lm-evaluation-harness on a model in our engine: any format, activations quantized as kernels do it.

The package ``lm_eval`` is the optional extra ``bitfoundry[eval]``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quantcore.config.task import EvaluationConfig
from quantcore.engine.evaluation.model import EvaluatedModel
from quantcore.engine.evaluation.model_pair import ModelPair
from quantcore.engine.runtime.devices import limit_threads
from quantcore.errors import ConfigError, unknown_value
from quantcore.report.quality import TaskResult, TaskResults
from quantcore.serving.run_in_env import VLLM_TASKS, kv_cache_dtype, run_in_env

Results = dict[str, dict[str, dict[str, float | None]]]
"""Results of one model by task and metric (``acc,none``): ``{value, stderr}``, as the baseline cache keeps them."""


def check(evaluation: EvaluationConfig) -> None:
    """Raise ConfigError if the tasks cannot run: ``no_lm_eval``, ``unknown_tasks``, ``no_include_path``."""
    if not evaluation.tasks:
        return
    check_folder(evaluation)
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "Tasks need lm-evaluation-harness, which is not installed.",
            code="no_lm_eval",
            hint="pip install 'bitfoundry[eval]', or remove the tasks.",
            field="/evaluation/tasks",
        )
    all_tasks = _manager(evaluation.include_path).all_tasks
    for task in evaluation.tasks:
        if task not in all_tasks:
            listed_by = "`lm_eval ls tasks`"
            error = unknown_value(
                "task", task, all_tasks, code="unknown_tasks", field="/evaluation/tasks", listed_by=listed_by
            )
            error.allowed = ()
            raise error


def check_folder(evaluation: EvaluationConfig) -> None:
    """Raise ConfigError ``no_include_path`` if the folder of local tasks does not exist."""
    if evaluation.include_path is not None and not evaluation.include_path.is_dir():
        raise ConfigError(
            f"There is no folder of tasks at {evaluation.include_path}.",
            code="no_include_path",
            field="/evaluation/include_path",
        )


def run_tasks(evaluation: EvaluationConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Results:
    """Run the tasks on ``model``. With several ranks only the first on each machine gets results."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=evaluation.batch_size)
        results: dict[str, Any] | None = simple_evaluate(
            model=wrapped,
            tasks=list(evaluation.tasks),
            limit=evaluation.limit,
            num_fewshot=evaluation.num_fewshot,
            task_manager=_manager(evaluation.include_path),
            bootstrap_iters=1000,
            log_samples=False,
        )
    return {} if results is None else {task: _metrics(rows) for task, rows in results["results"].items()}


def run_in_vllm(
    evaluation: EvaluationConfig, path: Path, original: Path | None, python: str
) -> tuple[TaskResults | Results, dict[str, str]]:
    """Run the tasks on the files as vLLM serves them; also return the versions of both programs.

    ``python``: the interpreter of the environment where both are installed. Raises ConfigError ``no_runtime``,
    ModelError ``runtime_failed``.
    """
    after, versions = _in_vllm(evaluation, path, python)
    if original is not None:
        return side_by_side(_in_vllm(evaluation, original, python)[0], after), versions
    return after, versions


def _in_vllm(evaluation: EvaluationConfig, path: Path, python: str) -> tuple[Results, dict[str, str]]:
    task = {
        "model": str(path.absolute()),
        "tasks": list(evaluation.tasks),
        "limit": evaluation.limit,
        "num_fewshot": evaluation.num_fewshot,
        "include_path": None if evaluation.include_path is None else str(evaluation.include_path),
        "num_threads": limit_threads(),
        "kv_cache_dtype": kv_cache_dtype(path),
    }
    answer = run_in_env(VLLM_TASKS, task, python=python, program="vllm")
    return {task: _metrics(rows) for task, rows in answer["results"].items()}, answer["versions"]


def settings(evaluation: EvaluationConfig) -> dict[str, Any]:
    """Return everything that decides the results of these tasks, including the files of local tasks."""
    folder = evaluation.include_path
    local = [] if folder is None else [path for path in folder.rglob("*") if path.is_file()]
    return {
        "tasks": evaluation.tasks,
        "limit": evaluation.limit,
        "num_fewshot": evaluation.num_fewshot,
        "batch_size": evaluation.batch_size,
        "lm_eval": version("lm_eval"),
        "local": sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in local),
    }


def compare(evaluation: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, pair: ModelPair) -> TaskResults:
    """Run the tasks on both models."""
    key = {"tasks": settings(evaluation)}
    before = pair.baselines.value(key, lambda: evaluate(evaluation, tokenizer, pair.original))
    return side_by_side(before, evaluate(evaluation, tokenizer, pair.quantized))


def side_by_side(before: Results, after: Results) -> TaskResults:
    """Pair the results of both models."""
    return {
        task: {
            metric: TaskResult.model_validate({"original": before[task].get(metric), "quantized": measure})
            for metric, measure in metrics.items()
        }
        for task, metrics in after.items()
    }


def evaluate(evaluation: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, model: EvaluatedModel) -> Results:
    """Run the tasks on a model, which is loaded as a whole for them."""
    with model.whole() as whole:
        results = run_tasks(evaluation, whole, tokenizer)
    return model.ranks.share(results)


def _metrics(rows: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Pair each metric with its error: the harness names them ``metric,filter`` and ``metric_stderr,filter``."""
    metrics = {}
    for name, value in rows.items():
        metric, comma, how = name.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            stderr = rows.get(f"{metric}_stderr,{how}")
            metrics[name] = {
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, int | float) else None,
            }
    return metrics


def _manager(include_path: Path | None) -> Any:
    from lm_eval.tasks import TaskManager

    with _quiet():
        return TaskManager(verbosity="ERROR", include_path=None if include_path is None else str(include_path))


@contextmanager
def _quiet() -> Iterator[None]:
    """Send output of the harness to stderr while this lasts, because stdout is for events alone."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
