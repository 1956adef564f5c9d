"""An artifact as one tar file, which is made while it is sent: nothing is written to the disk."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from api.jobs import being_sent, service
from api.store import manifest
from api.store.tables.jobs import Artifact, Job
from quantcore.sandbox.opening import open_file

CHUNK_BYTES = 1 << 20
END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Archive:
    """The tar file of an artifact: all its files, and the manifest, in the folder ``name``."""

    artifact: Artifact
    name: str

    @classmethod
    def of(cls, artifact: Artifact, job: Job) -> Archive:
        """Return the archive of a job's artifact, named after the model and the end of the job's id."""
        model = PurePosixPath(str(job.model.get("id") or job.model.get("path"))).name
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")
        return cls(artifact, f"{plain or 'model'}-{job.id[-6:]}")

    def entries(self) -> list[tuple[str, int]]:
        """Return the name and size of each file. Raises ProofError ``artifact_corrupt`` for a changed manifest."""
        contents = service.read_manifest(self.artifact)
        files = [(file.path, file.num_bytes) for file in contents.files.values()]
        return [*files, (manifest.MANIFEST, contents.num_bytes - sum(size for _, size in files))]

    def num_bytes(self) -> int:
        """Return the size of the whole tar file."""
        return sum(len(self._header(name, size)) + size + _padding(size) for name, size in self.entries()) + len(END)

    def content(self) -> Iterator[bytes]:
        """Yield the tar file. Each file is checked before it is sent; a damaged one ends it early, with an error.

        The files stay until all is sent, also if the job is deleted meanwhile.
        """
        with being_sent.held(Path(self.artifact.path)):
            yield from self._content()

    def _content(self) -> Iterator[bytes]:
        for name, size in self.entries():
            path, _ = service.find_file(self.artifact, name)
            yield self._header(name, size)
            left = size
            with open_file(path, root=path.parents[len(PurePosixPath(name).parts) - 1]) as file:
                while left > 0 and (chunk := file.read(min(CHUNK_BYTES, left))):
                    left -= len(chunk)
                    yield chunk
            if left:
                raise manifest.corrupt(f"{name} became shorter while it was sent")
            yield bytes(_padding(size))
        yield END

    def _header(self, name: str, size: int) -> bytes:
        entry = tarfile.TarInfo(f"{self.name}/{name}")
        entry.size, entry.mtime = size, int(self.artifact.created_at.timestamp())
        return entry.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE
