"""Runs in mlx-lm's environment: describe the models that it has a class for, as far as its sources say it.

usage: mlx_model_types.py -> one line ``RESULT {"version": ..., "models": {MODEL_TYPE: {...}}}``

``required`` and ``optional`` are the settings that a class takes from config.json. ``ties``: its output projection may
be the embedding. ``stacks``: it stacks experts that are stored one by one, codes and scales included. The result is
kept in quantcore/export/mlx_models.json; ``test_mlx.py`` compares the two.
"""

import importlib
import inspect
import json
import pkgutil
import re
import sys

import mlx_lm
from mlx_lm import models
from mlx_lm.utils import MODEL_REMAPPING

SHARED = {f"mlx_lm.models.{name}" for name in ("base", "cache", "switch_layers", "rope_utils", "activations", "mla")}
TIED = re.compile(r"as_linear|if .*tie_word_embeddings")
OWN_HEAD = {"helium"}
"""Classes that make an output projection in any case."""


def main() -> None:
    own = {module.name: described(module.name) for module in pkgutil.iter_modules(models.__path__)}
    remapped = {name: own.get(target) for name, target in MODEL_REMAPPING.items()}
    known = {name: entry for name, entry in sorted({**own, **remapped}.items()) if entry is not None}
    print("RESULT " + json.dumps({"version": mlx_lm.__version__, "models": known}))


def described(name):
    """Return the description of the class for this ``model_type``; None for a module without one."""
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except (ImportError, SystemExit):  # olmo ends the process without a package of its own
        return None
    if not (hasattr(module, "Model") and hasattr(module, "ModelArgs")):
        return None
    fields = inspect.signature(module.ModelArgs).parameters.values()
    sources = [inspect.getsource(each) for each in {module, *modules_behind(module)}]
    return {
        "required": sorted(field.name for field in fields if field.default is field.empty),
        "optional": sorted(field.name for field in fields if field.default is not field.empty),
        "ties": name not in OWN_HEAD and any(TIED.search(source) for source in sources),
        "stacks": any("experts.{" in source and '"scales"' in source for source in sources),
    }


def modules_behind(module):
    """Return the modules of other models that this one is made from."""
    names = {getattr(part, "__module__", getattr(part, "__name__", "")) for part in vars(module).values()}
    return {sys.modules[name] for name in names - SHARED if str(name).startswith("mlx_lm.models.")}


if __name__ == "__main__":
    main()
