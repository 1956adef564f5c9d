"""From a model reference to the model's headers. The one place where the API touches a model; it reads no weight."""

from __future__ import annotations

from typing import Any

from api.jobs.schemas import ModelRef
from api.settings import Settings
from quantcore.checkpoint import hub
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.errors import ModelError
from quantcore.export.stored import READ_BY_IMPORTERS
from quantcore.reading import read_model


def read_headers(model: ModelRef, settings: Settings) -> tuple[dict[str, Any], ModelHeaders]:
    """(the reference to store, the headers). Raises ModelError.

    What is stored says exactly what was read: a path as a real path, a Hub model with the commit that its revision
    stood for at this moment (``sha``), so that a retry of the job quantizes the same bytes.
    """
    if model.id is not None:
        headers, sha = _read_hub(model.id, model.revision)
        return {"id": model.id, "revision": model.revision, "sha": sha}, headers
    assert model.path is not None  # ModelRef has one of the two
    folder = settings.find_input(model.path, field="/model/path")
    return {"path": str(folder)}, read_model(folder).headers


def _read_hub(model_id: str, revision: str) -> tuple[ModelHeaders, str]:
    try:
        return hub.read_headers(
            model_id, revision, read=lambda folder: read_model(folder).headers, needed=READ_BY_IMPORTERS
        )
    except ModelError as error:
        error.field = "/model/revision" if error.code == "hub_revision_not_found" else "/model/id"
        raise
