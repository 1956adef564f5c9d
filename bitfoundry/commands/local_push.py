"""Publishes a local result from this machine, with its user's own rights: no service takes part."""

from pathlib import Path
from typing import Any

import typer

from bitfoundry.commands import terminal
from bitfoundry.errors import BitfoundryError
from quantcore.checkpoint.artifact import MANIFEST
from quantcore.cli.running import shown
from quantcore.config.values import config_error
from quantcore.config.verdict_levels import UNPUBLISHED
from quantcore.errors import PublishError, QuantError
from quantcore.events import Emit, Published
from quantcore.hub.push_task import PublishTask, digest, listed
from quantcore.hub.target import Target
from quantcore.report.compare import read_report


def push_folder(folder: Path, target: dict[str, Any], *, dry_run: bool, as_json: bool) -> None:
    """Publish the result in ``folder`` to the repository or URL of ``target``, and exit with the status.

    Raises BitfoundryError as the service refuses: ``poor_result`` unless ``force`` is set, ``invalid_publish``.
    """
    if "hub_token" in target:
        raise BitfoundryError(
            "--hub-token names a token of the service, and a local result is pushed from this machine.",
            code="invalid_publish",
            hint="Leave it out, and set HF_TOKEN or run `hf auth login`.",
        )
    if not target.pop("force", False):
        _check_result(folder)
    task = _task_of(folder, target)
    if dry_run:
        _show_files(task, as_json)
        return

    def work(emit: Emit) -> Published:
        if task.target.to is not None:
            from quantcore.hub.storage import store

            return store(task, emit)
        from huggingface_hub import get_token

        from quantcore.hub.push import push

        token = get_token()
        if not token:
            hint = "Set HF_TOKEN to one with write access, or run `hf auth login`."
            raise PublishError("Publishing to the Hub needs your token.", code="hub_token_required", hint=hint)
        return push(task, token, emit)

    def show(done: Published) -> None:
        if as_json:
            terminal.print_json(done.to_dict())
        else:
            terminal.out.print(
                f"Published: {done.url}{'' if done.is_new else ' (it was there already)'}", soft_wrap=True
            )

    raise typer.Exit(shown(work, show))


def _check_result(folder: Path) -> None:
    try:
        summary = read_report(folder).summary
    except QuantError as error:
        raise BitfoundryError.of(error) from error
    verdict, goal = summary.verdict, summary.goal
    if goal is not None and not goal.is_met:
        reason, advice = f"missed its goal: {goal.why}", "Allow a larger size, a lower recovery or more time."
    elif verdict is not None and verdict.level in UNPUBLISHED:
        reason, advice = f"is {verdict.level}: {verdict.reason}", verdict.advice or "Use a preset with more bits."
    else:
        return
    raise BitfoundryError(f"The result {reason}.", code="poor_result", hint=f"{advice} Or publish it with --force.")


def _task_of(folder: Path, target: dict[str, Any]) -> PublishTask:
    from pydantic import ValidationError

    try:
        manifest = (folder / MANIFEST).read_bytes()
        files = [{"path": path, "size": size, "sha256": sha} for path, (size, sha) in listed(manifest).items()]
        identity = f"pub_{digest(manifest)[:32]}"
        return PublishTask.model_validate(
            {"publication_id": identity, "attempt": 1, "folder": folder, "files": files, "target": target}
        )
    except OSError as error:
        raise BitfoundryError(
            f"{folder} has no {MANIFEST}: it is no complete result.",
            code="no_report",
            hint="Give the folder that `quantize` or a job wrote.",
        ) from error
    except ValidationError as error:
        wrong = config_error(error, "The target", code="invalid_publish")
        raise BitfoundryError(wrong.message, hint=wrong.hint, code=wrong.code) from error


def _show_files(task: PublishTask, as_json: bool) -> None:
    target: Target = task.target
    place, size = target.to or f"{target.repo_id} ({target.revision})", sum(file.size for file in task.files)
    if as_json:
        terminal.print_json({"files": [file.model_dump() for file in task.files], "bytes": size, "target": place})
        return
    for file in task.files:
        terminal.out.print(f"{file.size:>14,}  {file.path}", soft_wrap=True)
    terminal.out.print(f"{terminal.megabytes(size)} to {place}", soft_wrap=True)
