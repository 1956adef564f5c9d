"""Downloads a whole model from the Hugging Face Hub into a user's folder: one commit without pickles and code."""

from __future__ import annotations

import glob
from pathlib import Path, PurePosixPath
from typing import Any

from quantcore.config.time_limits import HUB_S
from quantcore.errors import ModelError
from quantcore.events import Emit, PhaseStarted
from quantcore.hub.download_progress import ByteCounter
from quantcore.hub.listing import MANIFEST, NUM_CONNECTIONS, PICKLES, check_manifest, matches
from quantcore.hub.names import is_model_id
from quantcore.hub.repository import CommittedFile, check_downloaded
from quantcore.hub.session import hub_api, limit_waits

LEFT_OUT = (*PICKLES, "*.py", "*.msgpack", "*.h5")


def pull(model_id: str, revision: str, output_dir: Path, emit: Emit) -> dict[str, Any]:
    """Fetch the files of ``model_id`` at ``revision`` into ``output_dir``, and return a summary.

    Each file is checked against the hash of the commit, and against the MANIFEST.json next to it. Existing files are
    kept, so that an interrupted pull continues. Raises ModelError ``hub_*``.
    """
    if not is_model_id(model_id):
        raise ModelError(
            f"'{model_id[:100]}' is neither the id of a job nor of a model on the Hub.",
            code="invalid_model_id",
            hint="A model id looks like org/name; a job id is job_ and 32 digits.",
        )
    from huggingface_hub import snapshot_download

    from quantcore.hub.hub_errors import explained

    emit(PhaseStarted("download"))
    with explained(model_id, revision):
        sha, files, left_out = _list(model_id, revision)
        counter = ByteCounter(sum(file.size for file in files.values()), emit)
        limit_waits()
        snapshot_download(
            model_id,
            revision=sha,
            allow_patterns=[glob.escape(name) for name in files],
            max_workers=NUM_CONNECTIONS,
            tqdm_class=counter.bar_class(),
            local_dir=output_dir,
        )
        for name, file in files.items():
            check_downloaded(output_dir / name, file)
    if MANIFEST in files:
        check_manifest(output_dir, files, (output_dir / MANIFEST).read_bytes())
    counter.finish()
    folder = str(output_dir.absolute())
    return {"model_id": model_id, "sha": sha, "folder": folder, "num_files": len(files), "left_out": left_out}


def _list(model_id: str, revision: str) -> tuple[str, dict[str, CommittedFile], list[str]]:
    """Return (commit, its files, the names of the files that are left out)."""

    info = hub_api().model_info(model_id, revision=revision, files_metadata=True, timeout=HUB_S)
    if info.sha is None:
        raise ValueError("the answer names no commit")
    files, left_out = {}, []
    for entry in info.siblings or ():
        name = entry.rfilename
        if matches(name, LEFT_OUT) or not _is_safe(name):
            left_out.append(name)
        else:
            files[name] = CommittedFile(entry.size or 0, entry.blob_id or "", entry.lfs.sha256 if entry.lfs else None)
    return info.sha, files, left_out


def _is_safe(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and str(path) == name
        and not path.is_absolute()
        and ".." not in path.parts
        and "\\" not in name
        and name.isprintable()
        and path.parts[0] not in (".git", ".cache")
    )
