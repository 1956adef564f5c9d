"""Runs in mlx-lm's environment: list the values of ``model_type`` that it has a class for.

usage: mlx_model_types.py -> one line ``RESULT {"version": ..., "model_types": [...]}``

The list is kept in quantcore/export/mlx_models.json; ``test_mlx.py`` compares the two.
"""

import importlib
import json
import pkgutil

import mlx_lm
from mlx_lm import models
from mlx_lm.utils import MODEL_REMAPPING


def main() -> None:
    own = [module.name for module in pkgutil.iter_modules(models.__path__) if has_model(module.name)]
    remapped = [name for name, target in MODEL_REMAPPING.items() if target in own]
    result = {"version": mlx_lm.__version__, "model_types": sorted({*own, *remapped})}
    print("RESULT " + json.dumps(result))


def has_model(name):
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except (ImportError, SystemExit):  # olmo ends the process without a package of its own
        return False
    return hasattr(module, "Model") and hasattr(module, "ModelArgs")


if __name__ == "__main__":
    main()
