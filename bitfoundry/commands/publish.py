"""The commands `push` (publishes an artifact) and `pull` (downloads a model or an artifact)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from bitfoundry.commands import terminal
from bitfoundry.commands.options import AsJson, Home, Key, ResultName, Url, connect, connect_if_any, read_config
from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from bitfoundry.client.answers import ArtifactFile, Job
    from bitfoundry.client.model_answers import ModelVersion
    from bitfoundry.client.service import Client

MANIFEST = "MANIFEST.json"

Repo = Annotated[str | None, typer.Option(help="Repository on the Hub: org/name. It is created if it does not exist.")]
WriteToken = Annotated[
    str | None, typer.Option("--hub-token", help="Name of the project's Hub token with write access.")
]


def push(
    name: ResultName,
    repo: Repo = None,
    to: Annotated[
        str | None,
        typer.Option(help="URL to publish to instead of --repo: s3://... It must be allowed by the operator."),
    ] = None,
    hub_token: WriteToken = None,
    private: Annotated[
        bool, typer.Option("--private", help="Create the repository as private, if it does not exist.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; created if it does not exist. [default: main]")] = None,
    create_pr: Annotated[
        bool,
        typer.Option("--create_pr", "--create-pr", help="Open a pull request instead of committing to the branch."),
    ] = False,
    commit_message: Annotated[
        str | None, typer.Option("--commit_message", "--commit-message", help="Commit message, one line.")
    ] = None,
    path_in_repo: Annotated[
        str | None, typer.Option("--path_in_repo", "--path-in-repo", help="Folder in the repository.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also publish a result that is degraded or broken, or that missed its goal."),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace another artifact of the project in the folder of --to.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", "--dry-run", help="Check everything and show what would be pushed.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is published.")] = True,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Publish the artifact of a succeeded job, or a result of this machine, to the Hub or to a URL.

    It is safe to repeat. Without --repo and --to, the last failed publication of a job is retried. A job is published
    by the service; a result of this machine from here, with your token: HF_TOKEN, or `hf auth login`.
    """
    fields = {
        "repo_id": repo,
        "to": to,
        "hub_token": hub_token,
        "private": private or None,
        "revision": revision,
        "create_pr": create_pr or None,
        "commit_message": commit_message,
        "path_in_repo": path_in_repo,
        "force": force or None,
        "replace": replace or None,
    }
    target = {name: value for name, value in fields.items() if value is not None}
    if target and not repo and not to:
        raise BitfoundryError(
            "No target to publish to",
            hint="Add --repo ORG/NAME or --to URL. Omit all options to retry the last publication.",
        )
    folder, job_id = _find(name, url, api_key, home)
    if folder is not None:
        from bitfoundry.commands.local_push import push_folder

        if not target or not wait:
            fault = "--no-wait is for jobs of a service" if target else "No target to publish to"
            raise BitfoundryError(fault, hint="Leave it out." if target else "Add --repo ORG/NAME or --to URL.")
        push_folder(folder, target, dry_run=dry_run, as_json=as_json)
        return
    with connect(url, api_key, home) as client:
        if dry_run:
            _show_plan(client.plan_publication(job_id, target), as_json)
            return
        job = client.publish(job_id, target or None)
        if wait:
            job = await_published(client, job)
    show_publication(job, as_json)


def _job_called(name: str, url: str | None, api_key: str | None, home: Path | None) -> str | None:
    """Return the id of the job of the service that ``name`` means; None for a model on the Hub."""
    from bitfoundry.client.service import JOB_ID

    if JOB_ID.fullmatch(name):
        return name
    client = None if "/" in name else connect_if_any(url, api_key, home)
    if client is None:
        return None
    with client:
        try:
            return client.find(name).id
        except BitfoundryError as error:
            if error.code != "job_not_found" or name == "last":
                raise
    return None  # the oldest models on the Hub have no organization: gpt2


def _find(name: str, url: str | None, api_key: str | None, home: Path | None) -> tuple[Path | None, str]:
    """Return the folder of a local result, or None and the id of a job."""
    from bitfoundry.client.service import JOB_ID
    from bitfoundry.commands.results import LocalRun, find_result

    if Path(name).is_dir():
        return Path(name), ""
    if JOB_ID.fullmatch(name):
        return None, name
    client = connect_if_any(url, api_key, home)
    with client or nullcontext():
        found = find_result(name, client)
    return (Path(found.folder), "") if isinstance(found, LocalRun) else (None, found.id)


def pull(
    source: Annotated[
        str,
        typer.Argument(
            help="Model on the Hub (org/name); version in the model registry (support-bot@production);"
            " or job: its id or the start of it, its name, or `last`."
        ),
    ],
    output_dir: Annotated[
        Path, typer.Option("-o", "--output", "--output_dir", "--output-dir", help="Folder for the files.")
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model. [default: main]")] = None,
    url: Url = None,
    api_key: Key = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Download a model from the Hub or a job's artifact, and verify every file. Run it again to resume.

    Of a version in the model registry the SHA-256 is verified, too, and the folder holds no other files.

    A private or gated model needs your own token on this machine: HF_TOKEN, or `hf auth login`.
    """
    version = _version_called(source, url, api_key, home)
    job_id = version.job_id if version else _job_called(source, url, api_key, home)
    if job_id is None:
        from quantcore.cli import main as engine

        more = (["--revision", revision] if revision else []) + (["--json"] if as_json else [])
        raise typer.Exit(engine.main(["pull", source, "--output_dir", str(output_dir), *more]))
    if revision:
        raise BitfoundryError("A job's artifact has no revisions", hint="Remove --revision.")
    with connect(url, api_key, home) as client, _bar() as bar:
        files = client.artifacts(job_id)
        if version is not None:
            _check_version(version, files, output_dir)
        task = bar.add_task("download", total=sum(file.bytes for file in files))

        def count(file: ArtifactFile, num_bytes: int) -> None:
            bar.advance(task, num_bytes)

        folder = client.download(job_id, output_dir, on_bytes=count)
        bar.update(task, completed=sum(file.bytes for file in files))
    if as_json:
        names = ("model", "version", "job_id", "sha256")
        of_version = {name: getattr(version, name) for name in names} if version else {}
        terminal.print_json({"folder": str(folder.absolute()), "num_files": len(files)} | of_version)
    else:
        what = f"{version.model}@{version.version}, " if version else ""
        terminal.out.print(f"Downloaded and verified: {what}{len(files)} files in {folder}", soft_wrap=True)


COMMANDS: tuple[Callable[..., None], ...] = (push, pull)


def _version_called(name: str, url: str | None, api_key: str | None, home: Path | None) -> ModelVersion | None:
    """Return the version in the registry of the service that ``name`` means, if it means one."""
    from bitfoundry.client.registry import REFERENCE

    client = connect_if_any(url, api_key, home) if REFERENCE.fullmatch(name) else None
    with client or nullcontext():
        return client.registry.find_version(name) if client else None


def _check_version(version: ModelVersion, files: Sequence[ArtifactFile], folder: Path) -> None:
    """Check that ``files`` are those of the version, and that the folder holds nothing else. Raises BitfoundryError.

    The download then checks the content of each file.
    """
    sha256 = next((file.sha256 for file in files if file.path == MANIFEST), "missing")
    if sha256 != version.sha256:
        raise BitfoundryError(
            f"The files are not those of {version.model}@{version.version}: their manifest has the SHA-256 {sha256},"
            f" and the version {version.sha256}.",
            code="artifact_changed",
            hint="Tell the operator: `bitfoundry fsck` finds damaged files.",
        )
    known = {file.path for file in files}
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    others = [name for name in found if name.removesuffix(".partial") not in known]
    if others:
        raise BitfoundryError(
            f"{folder} holds {others[0]}, which is not a file of {version.model}@{version.version}.",
            code="folder_not_empty",
            hint="Choose an empty folder, so that two versions never mix.",
        )


def read_target(text: str | None, hub_token: str | None) -> dict[str, Any] | None:
    """Return the target that `submit --publish` names: org/name, a URL, or a JSON file with a complete target."""
    if text is None:
        return None
    if text.endswith(".json"):
        target = read_config(text)
        return dict(target) if isinstance(target, dict) else None
    named = {"hub_token": hub_token} if hub_token else {}
    return {"to": text} if "://" in text else {"repo_id": text} | named


def await_published(client: Client, job: Job) -> Job:
    """Wait, with a progress bar, until the artifact is published or that has failed, and return the job."""
    with _bar() as bar:
        task = bar.add_task("publish", total=None)

        def show(job: Job) -> None:
            progress = job.publication and job.publication.progress
            if progress:
                bar.update(task, completed=progress.done, total=progress.total)

        return client.wait_published(job.id, on_change=show)


def show_publication(job: Job, as_json: bool) -> None:
    """Print a publication's result as text or JSON. Exit status 1 if it has failed."""
    publication = job.publication
    if as_json:
        terminal.print_json(job.model_dump(mode="json"))
    elif publication is not None:
        terminal.out.print(terminal.publication_details(publication))
    if publication is not None and publication.state == "failed":
        raise typer.Exit(1)


def _show_plan(plan: dict[str, Any], as_json: bool) -> None:
    if as_json:
        terminal.print_json(plan)
        return
    for file in plan["files"]:
        terminal.out.print(f"{file['bytes']:>14,}  {file['path']}", soft_wrap=True)
    state = {True: "exists", False: "will be created", None: "will be checked when publishing"}[plan["exists"]]
    terminal.out.print(f"{terminal.megabytes(plan['bytes'])} to {plan['url']}, which {state}", soft_wrap=True)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=terminal.err, disable=not terminal.err.is_terminal, transient=True)
