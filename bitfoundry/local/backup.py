"""Backups of a local stack's data in one file: `bitfoundry backup FILE`, `bitfoundry restore FILE`.

The file is a tar: a dump of the database, then the files, then MANIFEST.json with the SHA-256 of each, and the
signature of that by the service's secret key: a dump is SQL, which can run programs. The database is dumped first:
files are written before the rows that name them and never change, so they still exist afterwards. The file gets its
name when it is complete, and a restored folder when everything in it has been checked: a killed run leaves nothing
that looks complete.
"""

import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

import psycopg

from api.store.vault import Vault
from bitfoundry.errors import StackError
from bitfoundry.local.folders import Lock, private_dir
from bitfoundry.local.postgres import DATABASE, SUPERUSER, Postgres, find_binaries
from bitfoundry.local.supervision import Say
from quantcore.config.time_limits import DATABASE_CONNECT_S, DATABASE_MIGRATION_S
from quantcore.errors import ConfigError

NAME_FAULTS = frozenset((errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP))
"""Errors of a file system that cannot store a file under this name."""
FORMAT = 1
DUMP = "database.dump"
MANIFEST = "MANIFEST.json"
SIGNATURE = "MANIFEST.json.hmac"
SECRET_KEY = "secret.key"
FOLDERS = ("artifacts/job_*", "datasets/*", "uploads/upl_*")
CHUNK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 256 << 20
CLEAR_LIMIT_S = 20.0


def back_up(home: Path, target: Path, say: Say) -> None:
    """Write all data of the stack in `home`, running or not, to the new file `target`. Raises StackError."""
    home, target = home.resolve(), target.absolute()
    if not (home / "postgres" / "PG_VERSION").exists():
        raise StackError(f"{home} contains no database of a local stack", hint="name its folder with --home")
    if os.environ.get("DATABASE_URL"):
        raise StackError(
            "the database is not part of the local stack: DATABASE_URL is set",
            hint="back it up with pg_dump, then copy the data folder (docs/how-to/back-up.md)",
        )
    if os.path.lexists(target) or target.is_relative_to(home):
        raise StackError(f"{target} exists or lies in the data folder", hint="use the name of a new file elsewhere")
    partial = target.with_name(f".{target.name}.partial")  # a folder: nobody takes it for a backup
    try:
        private_dir(partial)
        with Lock(partial / "lock"), _removed_on_failure(partial):
            say("dumping the database")
            with _server(home) as server:
                _dump(server, partial / DUMP)
            say("copying files")
            _pack(home, partial)
            os.link(partial / "backup.tar", target)  # unlike a rename, it never replaces another file
            _sync(target.parent)
            shutil.rmtree(partial)
    except OSError as error:
        raise StackError(
            f"the backup could not be written: {error.strerror}", hint=f"nothing was written; check {target.parent}"
        ) from error


def find_vault(home: Path, key_file: Path | None = None) -> Vault | None:
    """Return the vault of `key_file`, else of the key that the environment names, else of the service in `home`.

    Raises StackError for a key that cannot be used.
    """
    text = os.environ.get("BITFOUNDRY_SECRET_KEY")
    named = key_file or os.environ.get("BITFOUNDRY_SECRET_KEY_FILE")
    file = Path(named or home / SECRET_KEY)
    try:
        if text and key_file is None:
            return Vault.of_text(text)
        return Vault.of_file(file) if named or file.exists() else None
    except ConfigError as error:
        raise StackError(error.message, hint=error.hint) from error


def restore(source: Path, home: Path, say: Say, *, vault: Vault | None, trusted: bool = False) -> None:
    """Restore the backup `source` to the folder `home`, which must be absent or empty.

    Unless it is `trusted`, the key of `vault` must have signed it. Raises StackError.
    """
    home = home.absolute()
    if home.exists() and any(home.iterdir()):
        raise StackError(f"{home} is not empty", hint="move it away first, or restore to another folder with --home")
    fresh = home.with_name(f".{home.name}.restoring")
    try:
        private_dir(fresh)
        with Lock(fresh / "stack.lock"), _removed_on_failure(fresh):
            Postgres(fresh).end_orphans()
            _clear(fresh)  # the remains of a killed restore
            say("unpacking and checking files")
            manifest = _unpack(source, fresh, vault, trusted=trusted)
            say("creating the database")
            _load(fresh, home, manifest)
            (fresh / DUMP).unlink()
            for folder in (fresh, *(path for path in fresh.rglob("*") if "postgres" not in path.parts)):
                _sync(folder)
            fresh.rename(home)
            _sync(home.parent)
    except OSError as error:
        raise StackError(
            f"the backup could not be restored: {error}", hint=f"nothing was restored; check {home.parent}"
        ) from error


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove the folder if what is done with it fails. What a killed run leaves is removed by the next one."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _server(home: Path) -> Iterator[Path]:
    """Yield the socket folder of the database: of the running stack, or of a server started for this backup."""
    lock = Lock(home / "stack.lock")
    try:
        lock.acquire()
    except StackError:
        with suppress(OSError, IndexError):
            yield Path((home / "postgres" / "postmaster.pid").read_text().splitlines()[4])
            return
        raise
    server = Postgres(home)
    try:
        server.start()
        yield Path(server.url.partition("host=")[2])
    finally:
        server.stop()
        lock.release()


def _dump(sockets: Path, file: Path) -> None:
    _run("pg_dump", sockets, "--format=custom", f"--file={file}")


def _run(program: str, sockets: Path, *args: str) -> None:
    where = [f"--host={sockets}", f"--username={SUPERUSER}", f"--dbname={DATABASE}"]
    command: list[str | Path] = [find_binaries() / program, *where, *args]
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise StackError(f"{program} failed with status {done.returncode}: {done.stderr.strip()[-800:]}")


def _pack(home: Path, partial: Path) -> None:
    entries: list[dict[str, Any]] = []
    descriptor = os.open(partial / "backup.tar", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, path in ((DUMP, partial / DUMP), *_files(home)):
                with suppress(FileNotFoundError):  # deleted meanwhile, as its row is
                    entries.append(_add(tar, name, path))
            content = json.dumps({"format": FORMAT, "home": str(home), "files": entries}).encode()
            _add_bytes(tar, MANIFEST, content)
            if vault := find_vault(home):
                _add_bytes(tar, SIGNATURE, vault.sign(content).encode())
        stream.flush()
        os.fsync(stream.fileno())


def _add_bytes(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _files(home: Path) -> Iterator[tuple[str, Path]]:
    roots = [home / SECRET_KEY, *(path for pattern in FOLDERS for path in sorted(home.glob(pattern)))]
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(home).as_posix(), path


class _Hashed:
    """A reader of a file that hashes the bytes it reads."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _add(tar: tarfile.TarFile, name: str, path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        info = tarfile.TarInfo(name)
        info.size, info.mode = os.fstat(file.fileno()).st_size, 0o600
        hashed = _Hashed(file)
        tar.addfile(info, hashed)
    return {"path": name, "size": info.size, "sha256": hashed.digest.hexdigest()}


def _unpack(source: Path, fresh: Path, vault: Vault | None, *, trusted: bool) -> dict[str, Any]:
    """Extract every file to its place, and return the manifest.

    Raises StackError for absent or changed files, and for a manifest that is not signed unless it is `trusted`.
    """
    digests: dict[str, str] = {}
    ends = {MANIFEST: b"", SIGNATURE: b""}
    seen: set[str] = set()
    name = ""
    try:
        with tarfile.open(source, mode="r|") as tar:
            for info in tar:
                name = info.name
                file = tar.extractfile(info) if info.isreg() else None
                if file is None:
                    raise _damaged(source, f"'{name}' is not a file")
                if name in ends:
                    ends[name] = _read_end(source, info, file)
                else:
                    path = _checked(source, name, seen)
                    digests[name] = _write(file, fresh / path)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise _damaged(source, str(error)) from error
    except OSError as error:
        if error.errno not in NAME_FAULTS:
            raise
        raise _damaged(source, f"'{name[:100]}' cannot be written ({error.strerror})") from error
    if not trusted:
        _check_signature(source, ends[MANIFEST], ends[SIGNATURE], vault)
    try:
        manifest: dict[str, Any] = json.loads(ends[MANIFEST])
        is_ours = manifest["format"] == FORMAT and isinstance(manifest["home"], str)
        expected = {str(entry["path"]): str(entry["sha256"]) for entry in manifest["files"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
    if not is_ours or DUMP not in expected:
        raise _damaged(source, "its manifest is missing, damaged or from another release")
    if wrong := sorted(name for name in digests.keys() | expected.keys() if digests.get(name) != expected.get(name)):
        raise _damaged(source, f"'{wrong[0]}' is missing or has changed ({len(wrong)} in total)")
    return manifest


def _check_signature(source: Path, manifest: bytes, signature: bytes, vault: Vault | None) -> None:
    if not signature:
        why = "nobody signed it: it is from an older release or from a service without a secret key"
    elif vault is None:
        why = "there is no secret key on this machine to check its signature with"
    elif not vault.has_signed(manifest, signature.decode("latin-1")):
        why = "another secret key signed it, or it was changed"
    else:
        return
    raise StackError(
        f"{source} is not trusted: {why}",
        hint="a backup is SQL, which can run programs on this machine; specify the service's key with --key-file, "
        "or use --trust if you are sure that nobody else could write the file",
    )


def _read_end(source: Path, info: tarfile.TarInfo, file: IO[bytes]) -> bytes:
    if info.size > MAX_MANIFEST_BYTES:
        raise _damaged(source, f"'{info.name}' is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
    return file.read()


def _checked(source: Path, name: str, seen: set[str]) -> PurePosixPath:
    """Return the path of a member. Raises StackError for one elsewhere, or that looks like another one (``seen``)."""
    path = PurePosixPath(name)
    is_ours = name in (DUMP, SECRET_KEY) or any(
        name.startswith(f"{folder.partition('/')[0]}/") and len(path.parts) > 1 for folder in FOLDERS
    )
    if str(path) != name or path.is_absolute() or ".." in path.parts or not is_ours or not name.isprintable():
        raise _damaged(source, f"{name!r} does not belong in it")
    look = unicodedata.normalize("NFKC", name).casefold()  # what some file systems take for the same name
    if look in seen:
        raise _damaged(source, f"{name!r} occurs twice or is too similar to another name")
    seen.add(look)
    return path


def _write(file: IO[bytes], path: Path) -> str:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as target:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
    return digest.hexdigest()


def _load(fresh: Path, home: Path, manifest: dict[str, Any]) -> None:
    """Load the database from its dump, and move the artifact paths in its rows to the new home."""
    server = Postgres(fresh)
    url = server.start()
    try:
        _run(
            "pg_restore", Path(url.partition("host=")[2]), "--exit-on-error", "--single-transaction", str(fresh / DUMP)
        )
        with psycopg.connect(
            url.replace("+psycopg", "", 1),
            connect_timeout=DATABASE_CONNECT_S,
            options=f"-c statement_timeout={DATABASE_MIGRATION_S}s",
        ) as session:
            before = manifest["home"]
            session.execute(
                "UPDATE artifact SET path = %s || substr(path, %s) WHERE starts_with(path, %s)",
                [str(home), len(before) + 1, f"{before}/"],
            )
    finally:
        server.stop()


def _clear(folder: Path) -> None:
    """Remove all but the lock. Processes of a killed restore may still be ending, and write meanwhile."""
    limit = time.monotonic() + CLEAR_LIMIT_S
    while left := [path for path in folder.iterdir() if path.name != "stack.lock"]:
        if time.monotonic() > limit:
            raise StackError(f"{left[0]} cannot be removed", hint="remove it, then try again")
        for path in left:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        time.sleep(0.1)


def _damaged(source: Path, why: str) -> StackError:
    return StackError(f"{source} is not a complete backup: {why}", hint="nothing was restored; use another backup")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
