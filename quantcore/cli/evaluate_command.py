"""The commands ``evaluate`` and ``reference``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from quantcore.cli.flags import add_cache_dtypes, add_evaluation, new_file
from quantcore.cli.from_flags import evaluation_of
from quantcore.cli.grammar import of_a_model
from quantcore.cli.inputs import Find, check_models, check_prompts, check_text, found
from quantcore.cli.running import WORSE, is_first_rank, print_json, reporting, saying_nothing, shown
from quantcore.config.cache_dtypes import cache_dtypes
from quantcore.config.verdict_levels import UNPUBLISHED
from quantcore.errors import ConfigError
from quantcore.events import Emit, print_json_lines
from quantcore.report.evaluation_result import EvaluationResult

GATES = ("warn", "fail")


def evaluate(arguments: list[str], find: Find) -> int:
    """Run ``evaluate MODEL [--against ORIGINAL]``: measure an existing model."""
    flags = of_a_model("evaluate", "Evaluate a model: perplexity, divergence from the original, tasks.")
    add = flags.add_argument
    add("--reference", type=Path, metavar="FILE", help="in place of --against: a file of `bitfoundry reference`")
    add("--gate", choices=GATES, default="warn", help="fail: exit with status 3 unless the verdict is good or better")
    add_evaluation(flags)
    add_cache_dtypes(flags)
    where = "run the tasks in vLLM; the Python interpreter of an environment with vllm and lm_eval"
    add("--vllm", metavar="PYTHON", help=where)
    options = found(flags.parse_args(arguments), find)
    if options.reference is not None and (options.against is not None or options.eval_dataset is not None):
        flags.error("--reference brings its own text and original; remove --against and --eval_dataset")
    if options.reference is not None and options.prompts is not None:
        flags.error("--reference brings its own prompts; give --prompts to `bitfoundry reference`")
    if options.prompts is not None and options.against is None:
        flags.error("--prompts needs an original, which answers them: --against MODEL")
    if options.behaviour and options.against is None:
        flags.error("--behaviour needs the original itself, which also answers: --against MODEL")
    if options.gate == "fail" and options.reference is None and options.against is None:
        flags.error("--gate fail needs an original: --against MODEL or --reference FILE")
    results: list[EvaluationResult] = []

    def work(emit: Emit) -> EvaluationResult:
        evaluation = evaluation_of(options)
        check_models(options.model_dir, options.against)
        check_text(evaluation)
        check_prompts(evaluation)
        if options.reference is not None and not options.reference.is_file():
            raise ConfigError(
                f"There is no file '{options.reference}'.",
                code="file_not_found",
                hint="Make a reference with `bitfoundry reference MODEL -o FILE`.",
            )
        from quantcore.engine.commands.evaluate import evaluate
        from quantcore.engine.runtime.devices import limit_threads
        from quantcore.engine.runtime.ranks import joined

        limit_threads()
        inputs = options.model_dir, options.against, evaluation, emit
        with joined() as ranks:
            results.append(
                evaluate(
                    *inputs,
                    vllm_python=options.vllm,
                    ranks=ranks,
                    reference_file=options.reference,
                    cache_dtypes=cache_dtypes(evaluation.kv_cache_dtypes),
                )
            )
        return results[0]

    if not is_first_rank():
        return reporting(saying_nothing(work), print_json_lines(sys.stderr))
    from quantcore.cli.console import show_evaluation

    status = shown(work, print_json if options.json else show_evaluation)
    if status or options.gate == "warn" or not results:
        return status
    verdict = results[0].verdict
    if verdict is not None and verdict.level not in UNPUBLISHED:
        return 0
    why = "there is no verdict" if verdict is None else f"the verdict is {verdict.level}, and {verdict.reason}"
    print(f"The gate failed: {why}.", file=sys.stderr)
    return WORSE


def reference(arguments: list[str], find: Find) -> int:
    """Run ``reference MODEL -o FILE``: write what a model predicts, to measure results by."""
    flags = of_a_model(
        "reference",
        "Write what a model predicts on a text, and for a chat model its own answers. Results are measured by the file"
        " later, on another machine or in a pipeline, without the model: evaluate OUT --reference FILE.",
        has_original=False,
    )
    flags.add_argument(
        "-o",
        "--output",
        type=new_file,
        required=True,
        metavar="FILE",
        help="file to write (safetensors); it must not exist",
    )
    add_evaluation(flags)
    options = found(flags.parse_args(arguments), find)
    if options.behaviour:
        flags.error("a reference holds no behaviour: use `bitfoundry evaluate OUT --against MODEL --behaviour`")

    def work(emit: Emit) -> dict[str, Any]:
        evaluation = evaluation_of(options)
        check_models(options.model_dir)
        check_text(evaluation)
        check_prompts(evaluation)
        from quantcore.engine.commands.reference import make_reference
        from quantcore.engine.runtime.devices import limit_threads

        limit_threads()
        return make_reference(options.model_dir, evaluation, options.output, emit)

    def show(done: dict[str, Any]) -> None:
        answers = f" and {done['num_answers']} answers" if done["num_answers"] else ""
        print(f"{done['output']}: {done['num_tokens']} tokens of text{answers}, {done['size_bytes'] / 1e6:.1f} MB")
        print(f"Measure a result by it: bitfoundry evaluate OUT --reference {done['output']}")

    return shown(work, print_json if options.json else show)
