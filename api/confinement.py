"""What a process that reads a stranger's files can reach: those files, and the programs that it runs.

Such processes are the engines of jobs and chats, and the API's readers. Where the kernel has Landlock, it enforces
these rules, even on a compromised process. Elsewhere the process itself checks the rules about its files
(``quantcore.sandbox.opening``): no link in a model gets around that check, but code smuggled into it would.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import urlsplit

from api.settings import Settings
from quantcore.checkpoint.folder import gguf_parts
from quantcore.checkpoint.side_files import side_files
from quantcore.errors import ConfigError, ModelError
from quantcore.hub import object_store
from quantcore.sandbox import landlock
from quantcore.sandbox.opening import VARIABLE, Identity, folders_beside, identify

logger = logging.getLogger(__name__)

PROGRAM = landlock.__file__
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store", "/sys",
    # Addresses of name servers, and the drivers' daemons; not all of /run, where containers have their secrets.
    "/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager", "/run/nvidia-persistenced",
    "/run/nvidia-topologyd", "/run/opengl-driver",
    # No files of accounts: /etc also has hashes of passwords, keys of hosts and settings of services.
    *(f"/etc/{name}" for name in (
        "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone", "locale.alias",
        "os-release", "hosts", "host.conf", "resolv.conf", "nsswitch.conf", "gai.conf", "protocols", "services",
        "mime.types", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/tls/openssl.cnf", "pki/ca-trust",
        "ca-certificates", "OpenCL", "vulkan", "glvnd", "nvidia", "rocm", "libibverbs.d", "nccl.conf", "fonts",
    )),
    # Of /proc what the kernel says of itself, and what it says of this process; nothing of others.
    *(f"/proc/{name}" for name in (
        "meminfo", "cpuinfo", "stat", "version", "uptime", "loadavg", "vmstat", "filesystems", "devices", "modules",
        "misc", "swaps", "sys", "driver",
    )),
    *(f"/proc/self/{name}" for name in (
        "status", "statm", "stat", "maps", "cgroup", "mounts", "mountinfo", "limits", "fd", "task", "comm", "cmdline",
        "auxv",
    )),
)  # fmt: skip
"""What programs need of the system. Landlock resolves /proc/self when it takes hold: to the engine's first process."""
DEVICES = (
    "null", "zero", "full", "random", "urandom", "tty", "shm", "pts", "nvidia*", "kfd", "dri", "dxg", "infiniband",
    "accel",
)  # fmt: skip
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "MIOPEN_USER_DB_PATH": "miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
}
"""Cache folders of compiled kernels.

Kernels are code: each attempt has its own folders, so that no engine runs what another job left.
"""
ORIGINALS = "BITFOUNDRY_ORIGINALS_DIR"


AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
LAST_PORT = 65535
HUB_PORTS = (53, 80, 443)
"""Name servers that answer over TCP, the Hub's servers and object stores; addresses in the environment add others."""


@dataclass(frozen=True)
class Reach:
    """Rules for a process, as real paths.

    ``files`` are the job's own, with their identities, None for folders that the process writes. ``listed`` folders
    only show the names in them. ``families`` are those of its sockets, ``tcp`` the [first, last] ports that it may
    connect to.
    """

    files: Mapping[Path, Identity | None]
    listed: tuple[Path, ...]
    read: tuple[Path, ...]
    written: tuple[Path, ...]
    variables: Mapping[str, str]
    families: tuple[int, ...]
    tcp: tuple[tuple[int, int], ...]

    def rules(self) -> dict[str, Any] | None:
        """Return the rules for ``landlock.confine``; None where the kernel has no Landlock."""
        if not landlock.abi():
            return None
        return {
            "list": _texts_of(self.listed),
            "read": _texts_of(self.read),
            "write": _texts_of(self.written),
            "same": [[str(path), *who] for path, who in self.files.items() if who is not None],
            "families": self.families,
            "tcp": self.tcp,
        }

    def command(self, argv: Iterable[str]) -> list[str]:
        """Return ``argv``, wrapped in Landlock where the kernel has it.

        The rules lie in a file, which the wrapper deletes: thousands of them would be too long for an argument. It is
        a file of this start alone, where no engine can write: the nodes of a job may share the attempt's folder.
        """
        rules = self.rules()
        if rules is None:
            return list(argv)
        with NamedTemporaryFile("w", prefix="bitfoundry-rules-", suffix=".json", delete=False) as file:
            json.dump(rules, file)
        return [sys.executable, "-I", "-S", PROGRAM, file.name, *argv]

    def environment(self) -> dict[str, str]:
        return {**self.variables, VARIABLE: json.dumps({str(path): who for path, who in self.files.items()})}


def _texts_of(paths: Iterable[Path]) -> list[str]:
    return [str(path) for path in paths]


def describe(settings: Settings) -> str:
    """Return the protection that such processes have here, for operators."""
    if not settings.confine_engine:
        return "off"
    return f"landlock {landlock.abi()}" if landlock.abi() else "none"


def tell(settings: Settings) -> None:
    """Log the protection of processes that read models. Raises ConfigError if the settings require more of it."""
    protection = describe(settings)
    if protection == "none" and settings.confine_engine == "required":
        raise ConfigError(
            "This kernel has no Landlock, but BITFOUNDRY_CONFINE_ENGINE is set to required.",
            code="no_sandbox",
            hint="Use Linux 5.19 or later with landlock in /sys/kernel/security/lsm, or set the variable to true.",
        )
    if protection == "none":
        logger.warning(
            "this kernel has no Landlock: engines check the files they open, but the kernel does not enforce it; "
            "see docs/concepts/confinement.md"
        )
    elif protection == "off":
        logger.warning("engines are not confined: turned off (BITFOUNDRY_CONFINE_ENGINE)")
    else:
        logger.info("engines are confined: Landlock, ABI %d", landlock.abi())


def reach_of(
    settings: Settings,
    folder: Path,
    task: Mapping[str, Any],
    *,
    with_hub: bool,
    with_store: bool = False,
    num_processes: int = 1,
    own: Sequence[Path] = (),
    originals: Path | None = None,
) -> Reach:
    """Return the rules for a process whose ``folder`` holds its ``task``: the attempt of an engine, a chat, a reader.

    It reaches the Hub's servers and caches ``with_hub``, and object stores ``with_store``. ``own`` are files of the
    service that it may read as well, ``originals`` a folder of results that it may write (see ``originals_of``). Makes
    the folders that the process needs. Raises ModelError ``path_not_allowed`` for a file that no such process may read,
    and ``unsafe_path`` if a link has taken the place of one since its path was resolved.
    """
    scratch = folder / "tmp"
    written = [folder, *_hub_caches()] if with_hub else [folder]
    written += [originals] if originals is not None else []
    for path in (scratch, *written):
        with suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = settings.secret_key_file
    hidden = (settings.data_dir, *([key.resolve()] if key is not None else []))
    files: dict[Path, Identity | None] = {path: identify(path) for path in own}
    for path in [*_model_files(task), *_texts(task), *_imatrices(task)]:
        copied = (folder, settings.copy_dir(folder.name.rpartition(".")[0]))  # by the service itself
        if not any(path.is_relative_to(place) for place in copied):
            _check_input(settings, path, hidden)
        with suppress(FileNotFoundError, PermissionError):  # the process says which of its files is missing
            files[path] = identify(path)
    beside = [Path(task["model_dir"]).parent] if Path(task.get("model_dir") or "").is_file() else []
    listed = [folder for folder in beside if not any(area.is_relative_to(folder) for area in hidden)]
    read: list[Path] = []
    for path in [*map(Path, SYSTEM), *_programs(settings)]:
        for shown, is_whole in _around(path if path.is_relative_to("/proc/self") else path.resolve(), hidden):
            (read if is_whole else listed).append(shown)
    devices = [path for name in DEVICES for path in sorted(Path("/dev").glob(name))]
    variables = {
        "TMPDIR": str(scratch),
        "HF_TOKEN_PATH": os.devnull,  # the token comes by its standard input
        "LOGNAME": "bitfoundry",  # libraries ask for the user's name, which is in a file of accounts
        **{name: str(scratch / kind) for name, kind in CACHES.items()},
    }
    files |= {path.resolve(): None for path in written}
    families, tcp = _network(settings, with_hub, with_store, num_processes)
    return Reach(files, tuple(listed), tuple(read), (*written, *devices), variables, families, tcp)


def _check_input(settings: Settings, path: Path, hidden: Sequence[Path]) -> None:
    """Raise ModelError ``path_not_allowed`` unless jobs may read ``path``, a real path.

    It lies below a folder of models or in a cache of the Hub, and holds nothing that is ``hidden``. In the data folder
    it is an artifact or a dataset, or below a folder of models that the operator has put there.
    """
    inside = next((area for area in hidden if area.is_relative_to(path)), None)
    if inside is not None:
        raise ModelError(
            f"The folder '{path}' contains files of the service, so jobs may not read it.",
            code="path_not_allowed",
            hint="Move the model to a separate folder.",
        )
    roots = [*settings.model_roots, *_hub_caches()]
    roots += [settings.lm_eval_tasks_dir] if settings.lm_eval_tasks_dir is not None else []
    if path.is_relative_to(settings.data_dir):
        roots = [root for root in roots if root != settings.data_dir and root.is_relative_to(settings.data_dir)]
        roots += [settings.datasets_dir, settings.artifacts_dir]
    if any(path.is_relative_to(root) for root in roots) and path not in (settings.datasets_dir, settings.artifacts_dir):
        return
    raise ModelError(
        f"The path '{path}' is not in a folder that this service may read from.",
        code="path_not_allowed",
        hint="Use a path below one of the allowed folders (the service's BITFOUNDRY_MODEL_ROOTS).",
        allowed=settings.model_roots,
    )


def _network(
    settings: Settings, with_hub: bool, with_store: bool, num_processes: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return the families of sockets and the TCP ports of a process: none without servers or other processes.

    Processes of one job find each other under any port, but for those of the database and the broker. On GPUs their
    libraries share memory through AF_UNIX.
    """
    if num_processes > 1:
        urls = (settings.database_url, settings.broker_url)
        closed = sorted({port for url in urls if (port := _port(url.get_secret_value()))})
        starts, ends = [1, *(port + 1 for port in closed)], [*(port - 1 for port in closed), LAST_PORT]
        families = (AF_INET, AF_INET6, AF_NETLINK, *([AF_UNIX] if Path("/dev/nvidia0").exists() else []))
        return families, tuple((first, last) for first, last in zip(starts, ends, strict=True) if first <= last)
    if with_hub or with_store:
        addresses = [os.environ.get(name, "") for name in ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY")]
        addresses += [object_store.address()] if with_store else []
        ports = {*HUB_PORTS, *filter(None, map(_port, addresses))}
        return (AF_INET, AF_INET6, AF_NETLINK), tuple((port, port) for port in sorted(ports))
    return (), ()


def _port(url: str) -> int | None:
    """Return the port of a URL; that of its scheme if it names none, and None for a socket in the file system."""
    usual = {"postgresql": 5432, "redis": 6379, "rediss": 6379, "http": 80, "https": 443}
    try:
        parts = urlsplit(url)
        return (parts.port or usual.get(parts.scheme.partition("+")[0])) if parts.hostname else None
    except ValueError:
        return None


def _model_files(task: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the model's folder with the blobs that a snapshot links to; for a GGUF file its parts and side files.

    The task of a chat also names a result.
    """
    if task.get("artifact_dir") is not None:
        yield Path(task["artifact_dir"])
    if task.get("model_dir") is None:
        return
    model = Path(task["model_dir"])
    yield model
    yield from folders_beside(model)
    if model.is_file():
        yield from (part for part in gguf_parts(model) if part != model and part.is_file() and not part.is_symlink())
        yield from (path for name in side_files(model.parent) if not (path := model.parent / name).is_symlink())


def _texts(task: Mapping[str, Any]) -> Iterator[Path]:
    for part in ("calibration", "evaluation"):
        for text in (task.get(part) or {}, *(task.get(part) or {}).get("sources", ())):
            yield from (Path(text[name]) for name in ("source", "include_path") if str(text.get(name)).startswith("/"))


def _imatrices(task: Mapping[str, Any]) -> Iterator[Path]:
    for algorithm in (task.get("config") or {}).get("algo_config", ()):
        if "imatrix" in algorithm:
            yield Path(algorithm["imatrix"])


def _programs(settings: Settings) -> Iterator[Path]:
    """Yield Python, its packages, and the paths in the engine's command."""
    yield from map(Path, (sys.prefix, sys.base_prefix, sys.exec_prefix))
    yield Path(PROGRAM).parents[2]
    yield from (Path(entry) for entry in sys.path if entry and Path(entry) != Path.cwd())
    for variable in ("LD_LIBRARY_PATH", "SSL_CERT_FILE"):
        yield from (Path(entry) for entry in os.environ.get(variable, "").split(os.pathsep) if entry)
    yield from (Path(part) for part in settings.engine_command.split() if part.startswith("/"))


def _hub_caches() -> list[Path]:
    """Return the caches of huggingface_hub and datasets; not their parent folder, which may hold a token."""
    home = Path(os.environ.get("HF_HOME") or Path(_cache(), "huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    return [hub, home / "xet", home / "datasets", home / "modules"]


def originals_of(project_id: str) -> Path | None:
    """Return the folder where engines of the project cache results of original models; None: they cache none.

    Whoever writes an entry decides what later jobs compare with, and a model may take an engine over. So each project
    has a folder of its own. See ``quantcore.engine.evaluation.baseline_cache``.
    """
    folder = os.environ.get(ORIGINALS)
    if folder is not None:
        return Path(folder) / project_id if folder else None
    return _cache() / "bitfoundry" / "projects" / project_id / "originals"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def _around(real: Path, hidden: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield the parts of ``real`` without the ``hidden`` paths. Links in it are left out.

    A part is (path, True), or (path, False) for a folder that contains a hidden path.
    """
    if real == Path("/") or any(real.is_relative_to(area) for area in hidden):
        return
    if not any(area.is_relative_to(real) for area in hidden):
        yield real, True
        return
    yield real, False
    with suppress(OSError):
        for child in sorted(real.iterdir()):
            if not child.is_symlink():
                yield from _around(child, hidden)
