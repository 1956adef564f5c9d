"""`bitfoundry demo`: a real model quantized three ways by the real stack, over HTTP as any client would."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from bitfoundry import demo_model, terminal
from bitfoundry.answers import Job
from bitfoundry.client import Client
from bitfoundry.local import LocalStack

PRESETS = ("int8_dynamic", "fp8", "w4a16")
CALIBRATION = {"source": "builtin", "num_samples": 32, "seq_len": 512}
EXPORTS = ("quark", "compressed_tensors")
POLL_S = 0.5


def run(home: Path | None, *, presets: Sequence[str] = PRESETS, as_json: bool = False) -> bool:
    """Unpack, start, submit, watch, show, stop. True when every job succeeded. Artifacts stay in `home`.

    Raises BitfoundryError; whatever happens, nothing that was started here is left running.
    """
    started = time.monotonic()
    model_dir = demo_model.prepare(_say)
    with LocalStack(home, port=0, model_roots=[model_dir.parent], say=_say) as stack:
        with Client(stack.url, stack.api_key) as client:
            jobs = [_submit(client, model_dir, preset) for preset in presets]
            jobs = _watch(client, stack, jobs)
        _say("stopping everything")
    if as_json:
        terminal.print_json([job.model_dump(mode="json") for job in jobs])
    else:
        _show(jobs, stack, time.monotonic() - started)
    return all(job.state == "succeeded" for job in jobs)


def _submit(client: Client, model_dir: Path, preset: str) -> Job:
    job = client.submit(
        model_dir, config=preset, calibration=CALIBRATION, export=EXPORTS, name=preset, labels={"from": "demo"}
    )
    _say(f"POST /v1/jobs {{preset: {preset}}} → 202 {job.id}")
    return job


def _watch(client: Client, stack: LocalStack, jobs: Sequence[Job]) -> list[Job]:
    """Poll until all have ended; a job that the worker has not reached yet shows as queued."""
    latest = {job.id: job for job in jobs}
    with terminal.Watch(terminal.err) as watch:
        for job in jobs:
            watch.update(job)
        while not all(job.is_final for job in latest.values()):
            time.sleep(POLL_S)
            stack.tend()
            for job_id, job in latest.items():
                if not job.is_final:
                    latest[job_id] = client.get(job_id)
                    watch.update(latest[job_id])
    return list(latest.values())


def _show(jobs: Sequence[Job], stack: LocalStack, seconds: float) -> None:
    out = terminal.out
    out.print(terminal.results_table(jobs))
    for job in jobs:
        if job.artifact:
            out.print(Text(f"{job.name}: {job.artifact.path}", "bold"), soft_wrap=True)
        for name, _, lines in terminal.load_lines(job):
            out.print(Text(f"  # {name}", "dim"))
            out.print(Text("\n".join(f"  {line}" for line in lines.splitlines())), soft_wrap=True)
    out.print(f"\n{seconds:.0f} s. The jobs and artifacts stay in {stack.home}:", highlight=False, soft_wrap=True)
    out.print("`bitfoundry up` shows them again, `make up` as well.", highlight=False)


def _say(message: str) -> None:
    terminal.err.print(Text.assemble(("· ", "cyan"), message), soft_wrap=True)
