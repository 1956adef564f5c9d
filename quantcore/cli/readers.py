"""Reads strangers' models for a service: a process that answers each request in a confined child of its own. No torch.

    python -m quantcore.cli.readers FD

Requests come as connections over the socket FD (SOCK_SEQPACKET, one descriptor a packet). Each connection carries one
pickled ``Request`` of the service and then one JSON object, ``{"result": {...}}`` or ``{"error": {...}}``. The child is
a fork of this process, so that nothing is imported again, with no secret in its memory, and its own limits of files,
sockets, memory and time. It holds what a request needs and ends with it.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quantcore.checkpoint.headers import ModelHeaders
from quantcore.config.job_spec import JobSpec
from quantcore.errors import ModelError, QuantError
from quantcore.export.importer import READ_BY_IMPORTERS
from quantcore.hub import download as hub
from quantcore.hub.outline import draw_outline
from quantcore.importing.grid_search import with_grids
from quantcore.importing.model import read_model
from quantcore.plan import inspection, mix_schemes
from quantcore.plan.capacity import capacity
from quantcore.plan.fitting import fit
from quantcore.plan.fitting import upper_bound as upper_bound_of_goal
from quantcore.plan.hardware import Hardware
from quantcore.plan.job import with_model_defaults
from quantcore.plan.planner import Plan, make_plan
from quantcore.sandbox import landlock


@dataclass(frozen=True)
class Request:
    """What a service asks of a model: its plans for ``specs``, or its inspection if there are none.

    The model is the folder or file ``path``, or ``model_id`` elsewhere with a ``revision``. With ``into`` it is only
    copied to that folder: its outline, or its tokenizer if that is ``what``. So a process that has the keys of a store
    reads no model, and the one that reads the copy (``is_outline``) has no keys. ``rules`` are those of
    ``landlock.confine``, None where the kernel has no Landlock; ``variables`` are added to the environment.
    """

    path: str | None = None
    model_id: str | None = None
    revision: str = hub.MAIN
    token: str | None = None
    specs: Sequence[JobSpec] | None = None
    hardware: Hardware | None = None
    into: str | None = None
    what: Literal["outline", "tokenizer"] = "outline"
    is_outline: bool = False
    rules: Mapping[str, Any] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int = 0
    seconds: int = 0


def main(arguments: Sequence[str]) -> int:
    """Serve requests until the service closes its end of the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets the children that have ended
    gc.freeze()  # so that a child copies less
    with socket.socket(fileno=int(arguments[0])) as requests:
        while True:
            _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
            if not descriptors:
                return 0
            if os.fork() == 0:
                try:
                    requests.close()
                    _answer(socket.socket(fileno=descriptors[0]))
                finally:
                    os._exit(0)
            os.close(descriptors[0])


def _answer(connection: socket.socket) -> None:
    """Answer the request of a connection."""
    with connection, connection.makefile("rwb") as stream, suppress(BrokenPipeError):
        request: Request = pickle.load(stream)
        _limit(request.memory_bytes, request.seconds)
        try:
            answer = {"result": _read(request)}
        except QuantError as error:
            answer = {"error": error.to_dict()}
        except MemoryError:
            answer = {"error": _too_large(request.memory_bytes).to_dict()}
        stream.write(json.dumps(answer).encode())
        stream.flush()


def _limit(memory_bytes: int, seconds: int) -> None:
    """Limit memory, processor time and time. The kernel ends a process that takes too long, whatever it does."""
    import resource  # the service runs on POSIX systems alone; this module can be imported anywhere

    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(2 * seconds)


def _read(request: Request) -> dict[str, Any]:
    os.environ.update(request.variables)
    os.chdir("/")
    if request.rules is not None:
        landlock.confine(request.rules)
    if request.into is not None:
        return {"sha": _copy(request, Path(request.into))}
    if request.specs is None:
        if request.model_id is None:
            inspected = inspection.inspect(Path(str(request.path)), is_whole=not request.is_outline)
            return {"sha": None, "inspection": inspected.to_dict()}
        inspected, commit = inspection.inspect_hub(request.model_id, request.revision, token=request.token)
        return {"sha": commit, "inspection": inspected.to_dict()}
    headers, sha = _headers(request)
    return {"sha": sha, "plans": [_plan(spec, headers, request.hardware) for spec in request.specs]}


def _copy(request: Request, folder: Path) -> str:
    """Copy a model's outline or tokenizer into ``folder`` and return its ``sha``."""
    folder.mkdir()
    listing = hub.list_files(str(request.model_id), request.revision, request.token)
    if request.what == "tokenizer":
        hub.download_tokenizer(listing.name, listing.sha, token=request.token, folder=folder)
    else:
        draw_outline(listing, folder, READ_BY_IMPORTERS)
    return listing.sha


def _headers(request: Request) -> tuple[ModelHeaders, str | None]:
    if request.model_id is None:
        return _read_headers(Path(str(request.path))), None
    return hub.read_headers(
        request.model_id, request.revision, read=_read_headers, needed=READ_BY_IMPORTERS, token=request.token
    )


def _read_headers(path: Path) -> ModelHeaders:
    return with_grids(read_model(path)).headers


def _plan(spec: JobSpec, headers: ModelHeaders, hardware: Hardware | None) -> dict[str, Any]:
    """Return the plan of one job with the defaults that depend on the model, or the error that it would end with."""
    try:
        spec = with_model_defaults(spec, headers.config)
        plan = _plan_of(spec, headers)
        needed = None
        if hardware is not None:
            blocks = [1] * plan.num_blocks
            needed = capacity(plan, spec, headers, blocks, hardware).to_dict()
        lengths = {"seq_len": spec.calibration.seq_len, "evaluation_seq_len": spec.evaluation.seq_len}
        return {"plan": plan.to_dict(), "export": spec.export, "capacity": needed, **lengths}
    except QuantError as error:
        return {"error": error.to_dict()}


def _plan_of(spec: JobSpec, headers: ModelHeaders) -> Plan:
    if spec.goal is not None:
        return upper_bound_of_goal(fit(spec.goal, headers, spec.calibration, spec.export))
    mix = spec.mix
    if mix is None:
        return make_plan(spec, headers)
    plans = mix_schemes.plan_each(
        mix,
        lambda config: make_plan(spec.model_copy(update={"config": config}), headers),
        spec.config.algo_config,
    )
    return mix_schemes.upper_bound(mix, plans)


def _too_large(memory_bytes: int) -> ModelError:
    return ModelError(
        f"To read the headers of this model takes more than {memory_bytes >> 20} MiB of memory.",
        code="model_too_large",
        hint="Its files list more tensors than any model has, or are damaged.",
    )


if __name__ == "__main__":
    from quantcore.cli import readers  # the requests are pickled as its classes

    sys.exit(readers.main(sys.argv[1:]))
