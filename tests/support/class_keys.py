"""The keys that the classes of the installed Transformers read from JSON files, found in the classes themselves."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from types import ModuleType

import transformers
import transformers.models
from transformers import FeatureExtractionMixin, PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

_PROCESSORS = ("processing_", "image_processing_", "feature_extraction_", "video_processing_")
_POPPED = re.compile(r"kwargs\.(?:pop|get|setdefault)\(\s*[\"'](\w+)[\"']")
_NO_TEXT = re.compile(r"int|float|bool")


@cache
def tokenizer_classes() -> tuple[type[PreTrainedTokenizerBase], ...]:
    """Return the classes of tokenizers, each once."""
    given = (names if isinstance(names, tuple | list) else [names] for names in TOKENIZER_MAPPING_NAMES.values())
    names = set(chain.from_iterable(given))
    found = (getattr(transformers, name, None) for name in sorted(filter(None, names)))
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase))


def tokenizer_keys() -> set[str]:
    """Return the keys of tokenizer_config.json: parameters of the classes, and what they take from their kwargs."""
    kinds = {part for kind in tokenizer_classes() for part in kind.__mro__}
    return {name for kind in kinds for name in _parameters(kind)} | _popped(
        {inspect.getmodule(kind) for kind in kinds if kind.__module__.startswith("transformers.")}
    )


@cache
def config_classes() -> tuple[type[PretrainedConfig], ...]:
    return tuple(
        kind for module in _modules(("configuration_",)) for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, PretrainedConfig) and kind.__module__ == module.__name__
    )  # fmt: skip


def config_keys() -> set[str]:
    """Return the keys of config.json that may have text: fields that are not only numbers, and kwargs of the classes.

    Fields of nested configs and of objects with known keys are looked for by their own classes.
    """
    found = {
        field.name for kind in config_classes() for field in dataclasses.fields(kind)
        if re.search(r"\bstr\b|Literal|Any", str(field.type)) and not re.match(r"dict|transformers\.", str(field.type))
    }  # fmt: skip
    return found | _popped(set(_modules(("configuration_",))))


def processor_keys() -> set[str]:
    """Return the keys of the files of processors that may have text."""
    found: set[str] = set()
    for module in _modules(_PROCESSORS):
        for kind in vars(module).values():
            if not isinstance(kind, type) or not issubclass(
                kind, ProcessorMixin | FeatureExtractionMixin | ImageProcessingMixin
            ):
                continue
            for part in kind.__mro__:
                found |= {name for name, text in _parameters(part).items() if text}
            for part in getattr(getattr(kind, "valid_kwargs", None), "__mro__", ()):
                annotations = getattr(part, "__annotations__", {})
                found |= {name for name, given in annotations.items() if "str" in str(given)}
    return found


def _parameters(kind: type) -> dict[str, bool]:
    """Return the parameters of a class's own ``__init__``, and for each whether it can be text."""
    if "__init__" not in vars(kind):
        return {}
    found = {}
    for each in list(inspect.signature(vars(kind)["__init__"]).parameters.values())[1:]:
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            continue
        is_number = isinstance(each.default, int | float) or (
            each.annotation is not each.empty and "str" not in str(each.annotation)
        )
        found[each.name] = not is_number
    return found


def _popped(modules: set[ModuleType | None]) -> set[str]:
    return {name for module in modules if module is not None for name in _POPPED.findall(inspect.getsource(module))}


@cache
def _modules(prefixes: tuple[str, ...]) -> tuple[ModuleType, ...]:
    return tuple(_imported(prefixes))


def _imported(prefixes: tuple[str, ...]) -> Iterator[ModuleType]:
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = importlib.import_module(f"transformers.models.{package.name}")
        for module in pkgutil.iter_modules(getattr(folder, "__path__", ())):
            if module.name.startswith(prefixes):
                try:
                    yield importlib.import_module(f"{folder.__name__}.{module.name}")
                except (ImportError, RuntimeError, NameError):  # it needs a package that is not installed
                    continue
