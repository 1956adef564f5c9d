"""The settings of the API and of the worker, read once from the environment.

``DATABASE_URL`` and ``BROKER_URL`` have their usual names, all others start with ``BITFOUNDRY_``.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from api.oidc.config import SIGN_IN_PAGE, OidcClient, read_config
from api.store.vault import Vault, read_secret_file
from quantcore.config.values import sentence_of
from quantcore.errors import ConfigError, ModelError, PublishError
from quantcore.hub.names import is_below, is_plain_url
from quantcore.hub.target import check_url, real_url
from quantcore.plan.this_machine import host_memory_bytes
from quantcore.sandbox.opening import resolved


def _split_folders(value: Any) -> Any:
    """Split ``/a:/b`` into real paths, so that a later comparison is between real paths too."""
    folders = [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value
    return tuple(Path(folder).resolve() for folder in folders)


def _split_networks(value: Any) -> Any:
    networks = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    return tuple(ip_network(network) for network in networks)


def _split_urls(value: Any) -> Any:
    """Split the plain URLs of folders; a folder on this machine becomes its real path, as in ``_split_folders``."""
    urls = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    for url in urls:
        check_url(url)
    return tuple(real_url(url) for url in urls)


def _check_public_url(url: str) -> str:
    """Return the URL without a slash at its end. Raises ValueError for one that no link can begin with."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname or not re.fullmatch(r"[!-~]+", url):
        raise ValueError("must be an address such as https://bitfoundry.example.org")
    if parts.query or parts.fragment or parts.username is not None or set(url) & set('<>|"'):
        raise ValueError("must have no user, query or fragment")
    return url.rstrip("/")


@contextmanager
def _pointing_at(field: str) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        error.field = field
        raise


def read_settings() -> Settings:
    """Read the settings from the environment. Raises ConfigError ``invalid_settings`` that names what is missing."""
    try:
        return Settings()  # type: ignore[call-arg]
    except ValidationError as error:
        faults = [f"{_variable(fault['loc'])} ({sentence_of(fault)})" for fault in error.errors(include_url=False)]
        raise ConfigError(
            f"The settings in the environment are not valid: {'; '.join(faults)}.",
            code="invalid_settings",
            hint="docs/reference/settings.md explains each. `bitfoundry up` needs none.",
        ) from error


def _variable(place: tuple[int | str, ...]) -> str:
    name = str(place[0]).upper()
    return name if name in ("DATABASE_URL", "BROKER_URL") else f"BITFOUNDRY_{name}"


class Settings(BaseSettings):
    """The settings of a process. Times are seconds.

    URLs are secret: they may hold a password and are never logged or shown.
    """

    model_config = SettingsConfigDict(env_prefix="BITFOUNDRY_", frozen=True, populate_by_name=True, extra="ignore")

    database_url: SecretStr = Field(validation_alias=AliasChoices("database_url", "DATABASE_URL"))
    broker_url: SecretStr = Field(validation_alias=AliasChoices("broker_url", "BROKER_URL"))
    data_dir: Annotated[Path, AfterValidator(Path.resolve)]
    presets_file: Path | None = None
    # Shows operators the results that the command line of this user made on this machine; `bitfoundry up` sets it.
    show_local_runs: bool = False
    model_roots: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split_folders)] = ()

    lease_s: PositiveFloat = 90
    heartbeat_s: PositiveFloat = 15
    poll_s: PositiveFloat = 10
    stop_grace_s: PositiveFloat = 30
    retry_base_s: PositiveFloat = 30

    max_dataset_bytes: PositiveInt = 1 << 30
    # Kept for the database on the data folder's disk: no job and no file is taken in below it. None: see ``api.disk``.
    reserved_disk_bytes: NonNegativeInt | None = None
    # Seals tokens and secrets of webhooks: 32 bytes in base64, here or in a file of mode 0600.
    secret_key: SecretStr | None = None
    secret_key_file: Path | None = None
    # Networks, as 10.0.0.0/8,127.0.0.1: webhooks may lead there, too, and over plain http.
    webhook_networks: Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode, BeforeValidator(_split_networks)] = ()
    # The address of the service for people, as https://bitfoundry.example.org: links in messages begin with it.
    public_url: Annotated[str, AfterValidator(_check_public_url)] | None = None
    # URLs of folders, as file:///srv/models,s3://bucket/models: artifacts may be published there, and below.
    publish_urls: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_urls)] = ()
    # URLs of folders in object stores, as s3://bucket/models,gs://other/models: jobs may read models below them.
    model_urls: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_urls)] = ()
    requests_per_minute: PositiveInt = 60_000  # of a project that has no limit of its own
    sign_in_s: PositiveFloat = 12 * 3600  # how long a browser stays signed in
    # Sign-in through an OpenID provider: a JSON file (``api.oidc.config``), and this service's secret at the provider,
    # here or in a file of mode 0600.
    oidc_file: Path | None = None
    oidc_client_secret: SecretStr | None = None
    oidc_client_secret_file: Path | None = None
    # Days after a job's end; None keeps it. Logs: also its events. Jobs: all of it, with its artifact.
    keep_logs_days: PositiveFloat | None = None
    keep_jobs_days: PositiveFloat | None = None
    # A folder with YAML files of tasks that jobs may name beside those of lm-evaluation-harness. They may run code.
    lm_eval_tasks_dir: Annotated[Path, AfterValidator(Path.resolve)] | None = None
    # A chat with a result: seconds until a worker must have taken it, without a prompt, and altogether; its turns, and
    # the tokens of an answer. On a worker: how it starts the engine of a chat.
    chat_wait_s: PositiveFloat = 60
    chat_idle_s: PositiveFloat = 300
    chat_max_s: PositiveFloat = 1800
    chat_max_turns: PositiveInt = 20
    chat_max_new_tokens: PositiveInt = 512
    chat_command: str = "{python} -m quantcore converse"
    log_format: Literal["text", "json"] = "text"
    trace_file: Path | None = None

    slots: PositiveInt = 1
    # What gives an engine its nodes: "local", this machine, or a scheduler ("slurm"), which then runs at most as many
    # jobs of this worker as it has slots. Its batch script; and the seconds between two questions to it.
    launcher: str = "local"
    launcher_template: Annotated[Path, AfterValidator(Path.resolve)] | None = None
    launcher_poll_s: PositiveFloat = 5
    memory_bytes: PositiveInt = Field(default_factory=host_memory_bytes)
    # An attempt may take so many times its planned memory, and 1 GiB more, before it is ended.
    memory_margin: Annotated[float, Field(ge=1)] = 1.5
    engine_threads: PositiveInt = Field(default_factory=lambda: len(os.sched_getaffinity(0)))
    engine_ranks: PositiveInt = 1
    # For jobs that several workers do together: the address of this one, and how long it waits for the others.
    node_address: str = Field(default_factory=socket.gethostname, min_length=1)
    gather_s: PositiveFloat = 60
    # Memory of a process that reads a model's headers for the API. Those of the largest models need some 300 MiB.
    reader_memory_bytes: PositiveInt = 1 << 30
    # An engine reaches its job's files and no others, as far as the kernel enforces it; "required": or nothing starts.
    confine_engine: bool | Literal["required"] = True
    engine_command: str = "{python} {launcher} -m quantcore run"

    @property
    def artifacts_dir(self) -> Path:
        return self.data_dir / "artifacts"

    @property
    def work_dir(self) -> Path:
        return self.data_dir / "work"

    def copy_dir(self, job_id: str) -> Path:
        """Return the folder with the copy of a job's model in an object store, which no engine may write."""
        return self.work_dir / f"{job_id}.model"

    @property
    def datasets_dir(self) -> Path:
        return self.data_dir / "datasets"

    @property
    def uploads_dir(self) -> Path:
        return self.data_dir / "uploads"

    @cached_property
    def vault(self) -> Vault | None:
        """The vault that seals secrets, None if no key is set. Raises ConfigError for a bad key or an unsafe file."""
        if self.secret_key:  # an empty variable is no key
            return Vault.of_text(self.secret_key.get_secret_value())
        return Vault.of_file(self.secret_key_file) if self.secret_key_file is not None else None

    def check_model_url(self, url: str) -> None:
        """Raise ModelError ``model_url_not_allowed`` unless jobs may read models at ``url``."""
        if not is_below(url, self.model_urls):
            raise ModelError(
                f"This service may not read models from '{url}'.",
                code="model_url_not_allowed",
                hint="Use a URL below one that the operator allows (BITFOUNDRY_MODEL_URLS).",
                allowed=self.model_urls,
            )

    @cached_property
    def oidc(self) -> OidcClient | None:
        """The OpenID provider that browsers sign in with, None without one. Raises ConfigError for what is missing."""
        if self.oidc_file is None:
            return None
        config = read_config(self.oidc_file)
        secret = self.oidc_client_secret.get_secret_value() if self.oidc_client_secret else ""
        if not secret and self.oidc_client_secret_file is not None:
            secret = read_secret_file(self.oidc_client_secret_file).strip()
        if not secret or self.public_url is None:
            missing = "BITFOUNDRY_OIDC_CLIENT_SECRET_FILE" if self.public_url else "BITFOUNDRY_PUBLIC_URL"
            raise ConfigError(
                f"BITFOUNDRY_OIDC_FILE is set, and {missing} is not.",
                code="oidc_setting_missing",
                hint="Sign-in through a provider needs the secret that the provider gave to this service "
                "(BITFOUNDRY_OIDC_CLIENT_SECRET_FILE, a file of mode 0600, or BITFOUNDRY_OIDC_CLIENT_SECRET), and the "
                "address that people open (BITFOUNDRY_PUBLIC_URL): the provider sends them back there.",
            )
        return OidcClient(config, SecretStr(secret), self.public_url + SIGN_IN_PAGE)

    def find_output(self, url: str) -> str:
        """Return the real URL of a folder that artifacts may be published to: below one of ``publish_urls``.

        Links of a folder on this machine are followed first. Raises PublishError ``target_not_allowed``, ModelError
        ``path_not_allowed``.
        """
        with _pointing_at("/publish/to"):
            real = real_url(url)
        if not is_below(real, self.publish_urls) or not is_plain_url(real):  # a link's target may make no valid URL
            raise PublishError(
                f"This service may not publish to '{url}'.",
                code="target_not_allowed",
                hint="Use a URL below one that the operator allows (BITFOUNDRY_PUBLISH_URLS).",
                field="/publish/to",
                allowed=self.publish_urls,
            )
        return real

    def find_input(self, path: str, *, field: str, is_own: Callable[[Path], bool] | None = None) -> Path:
        """Return the real path of a file or folder that a job may read: below one of ``model_roots``.

        Links are followed first. It is not in the data folder, unless a root lies in there itself. ``is_own`` tells if
        the folder of an artifact is the project's, whose jobs may read it then, too. Raises ModelError
        ``path_not_allowed`` that names ``field``, the JSON pointer of who asked.
        """
        with _pointing_at(field):
            real = resolved(path)
        roots = self.model_roots
        if real.is_relative_to(self.data_dir):
            roots = tuple(root for root in roots if root != self.data_dir and root.is_relative_to(self.data_dir))
        allowed = any(real.is_relative_to(root) for root in roots)
        if not allowed and is_own is not None and real.is_relative_to(self.artifacts_dir):
            job_and_hash = real.relative_to(self.artifacts_dir).parts[:2]
            allowed = is_own(self.artifacts_dir.joinpath(*job_and_hash))
        if not allowed or not Path(path).is_absolute():
            raise ModelError(
                f"The path '{path}' is not in a folder that this service may read from.",
                code="path_not_allowed",
                hint="Use an absolute path below one of the allowed folders (the service's BITFOUNDRY_MODEL_ROOTS).",
                field=field,
                allowed=self.model_roots,
            )
        return real
