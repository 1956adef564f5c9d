"""`bitfoundry demo`: the real stack quantizes a real model over HTTP, for a goal and with two presets."""

import io
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from bitfoundry.client.answers import Job
from bitfoundry.client.service import Client
from bitfoundry.commands import terminal
from bitfoundry.local import demo_model
from bitfoundry.local.stack import LocalStack

SHORTER = {"num_windows": 8, "num_prompts": 3, "num_answers": 8}
"""Half of the usual text for the evaluation, which takes most of a job's time; its intervals are wider."""
REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "auto": {
        "goal": {"runtime": "llama_cpp", "device": "cpu", "min_recovery": 0.97, "max_time_s": 60},
        "calibration": {"num_samples": 16, "seq_len": 128},
        "evaluation": SHORTER,
    },
    "int8_dynamic": {"config": "int8_dynamic", "evaluation": SHORTER},
    "gguf_q8_0": {"config": "gguf_q8_0", "evaluation": SHORTER},
}
"""Name of a job -> what it asks for. The goal is estimated from little text, and tries as much as a minute allows."""
SLOTS = 2
"""Jobs at once, so that no core waits while another one reads files or starts programs."""
POLL_S = 1.0
NEXT = """\
What to do next:
  the dashboard, with these jobs   bitfoundry up
  a model of yours, for a goal     bitfoundry auto MODEL --runtime vllm --device 24GB -o OUT
  with a scheme of your choice     bitfoundry quantize MODEL w4a16 -o OUT
  its answers beside the original  bitfoundry chat OUT"""
PICTURE_WIDTH = 124  # columns: no line of the demo is longer


class Demo:
    """A run of the demo: unpack, start, submit, watch, show, stop. Only artifacts stay in the home."""

    def __init__(
        self, home: Path | None, *, requests: Mapping[str, Mapping[str, Any]] = REQUESTS, quiet: bool = False
    ) -> None:
        self._home = home
        self._requests = requests
        self._quiet = quiet  # the caller prints the results
        self._shown: list[RenderableType] = []

    def run(self) -> list[Job]:
        """Run the demo and return the ended jobs. Raises BitfoundryError. Nothing is left running in any case."""
        started = time.monotonic()
        model_dir = demo_model.prepare(self._say)
        roots = [model_dir.parent]
        with LocalStack(self._home, port=0, model_roots=roots, slots=SLOTS, say=self._say) as stack:
            with Client(stack.url, stack.api_key) as client:
                jobs = self._watch(client, stack, [self._submit(client, model_dir, name) for name in self._requests])
            self._say("stopping the service")
        self._show(terminal.results_table(jobs))
        for job in jobs:
            self._show_loading(job, stack.home)
        self._show(Text(f"{time.monotonic() - started:.0f} s in total."))
        self._show(Text(NEXT))
        return jobs

    def save_picture(self, path: Path) -> None:
        """Write the output of the run as an SVG of a terminal."""
        console = Console(record=True, markup=False, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True)
        console.print(Text("$ make demo", "bold"))
        for part in self._shown:
            console.print(part)
        drawn = console.export_svg(title="Bitfoundry")
        # rich links a font on an external server; the reader's own monospace font is used instead.
        path.write_text(
            re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
        )

    def _submit(self, client: Client, model_dir: Path, name: str) -> Job:
        job = client.submit(model_dir, name=name, labels={"from": "demo"}, **self._requests[name])
        self._say(f"POST /v1/jobs {json.dumps(self._requests[name])} → 202 {job.id}")
        return job

    def _watch(self, client: Client, stack: LocalStack, jobs: Sequence[Job]) -> list[Job]:
        """Poll until all jobs have ended, and return them. A job that the worker has not reached shows as queued."""
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
        self._shown.append(watch.picture)
        return list(latest.values())

    def _show_loading(self, job: Job, home: Path) -> None:
        if job.artifact is None or job.artifact.path is None:
            return
        folder = _link(home / "demo" / str(job.name).replace(" ", "-"), Path(job.artifact.path))
        self._show(Text.assemble((f"{job.name} ", "bold"), (f"{folder}", "cyan")))
        self._show(Text(f"  {folder / 'report.html'}"))
        for lines in terminal.load_lines(job, str(folder)).values():
            self._show(Text("\n".join(f"  {line}" for line in lines.splitlines())))

    def _show(self, part: RenderableType) -> None:
        self._shown.append(part)
        if not self._quiet:
            terminal.out.print(part, soft_wrap=isinstance(part, Text))

    def _say(self, message: str) -> None:
        line = Text.assemble(("· ", "cyan"), message)
        self._shown.append(line)
        terminal.err.print(line, soft_wrap=True)


def _link(name: Path, artifact: Path) -> Path:
    """Make the short name `name` a link to the artifact, whose own path ends in its hash, and return it."""
    name.parent.mkdir(mode=0o700, exist_ok=True)
    if name.exists() and not name.is_symlink():
        return artifact  # the user's own folder
    name.unlink(missing_ok=True)
    name.symlink_to(artifact, target_is_directory=True)
    return name
