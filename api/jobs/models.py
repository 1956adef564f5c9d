"""From a model reference to the model's headers. The one place where the API touches a model; it reads no weight."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from api.jobs.schemas import ModelRef
from api.settings import Settings
from quantcore.checkpoint.headers import ModelHeaders, read_local
from quantcore.errors import ModelError

HUB_MODULE = "quantcore.checkpoint.hub"


def read_headers(model: ModelRef, settings: Settings) -> tuple[dict[str, Any], ModelHeaders]:
    """(the reference to store, the headers). Paths are stored as real paths. Raises ModelError."""
    if model.path is not None:
        folder = settings.find_input(model.path, field="/model/path")
        return {"path": str(folder)}, read_local(folder)
    return {"id": model.id, "revision": model.revision}, _read_hub(model)


def _read_hub(model: ModelRef) -> ModelHeaders:
    if importlib.util.find_spec(HUB_MODULE) is None:
        raise ModelError(
            "This service cannot fetch models from the Hugging Face Hub yet.",
            code="hub_not_available",
            hint="Give `model.path`: a folder with config.json and *.safetensors.",
            field="/model/id",
        )
    hub = importlib.import_module(HUB_MODULE)
    headers: ModelHeaders = hub.read_headers(model.id, model.revision)
    return headers
