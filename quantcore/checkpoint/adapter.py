"""Reads a PEFT adapter (LoRA, DoRA): which tensors of a model it changes, and how. No torch, no weights.

Every tensor of ``adapter_model.safetensors`` must have its place in the model and the right shape there, and every
module that ``adapter_config.json`` names must be in the file. An adapter that would be merged in part is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantcore.checkpoint.adapter_config import (
    MERGE_WITH_PEFT,
    AdapterConfig,
    invalid,
    parse_adapter_config,
    unsupported,
)
from quantcore.checkpoint.artifact import sha256
from quantcore.checkpoint.besides import ADAPTER
from quantcore.checkpoint.blocks import block_lists
from quantcore.checkpoint.folder import model_name
from quantcore.checkpoint.headers import check_files, read_json, read_safetensors_header
from quantcore.checkpoint.layers import find_conv1d, is_embedding, is_head
from quantcore.checkpoint.layout import TensorHeader
from quantcore.checkpoint.model_config import ModelConfig
from quantcore.errors import ModelError
from quantcore.sandbox.opening import MAX_SIDE_FILE_BYTES, read_bytes

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_TEMPLATE, _TOKENIZER = "chat_template.jinja", "tokenizer_config.json"
_PART = re.compile(
    r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
)
_TAIL = re.compile(r"(?:(.*?)\.)??([^.]+\.\d+\..+|[^.]+\.[^.]+)")
"""A tensor's name from its first numbered list on, or its last two parts; and what comes before."""


@dataclass(frozen=True)
class LowRank:
    """A product that is added to a weight [O, I]: ``scaling`` * B A. ``a`` [R, I] and ``b`` [O, R] name its tensors.

    ``magnitude`` [O] (DoRA) are the new lengths of the rows. The weight is stored [I, O] if ``is_transposed``. Of an
    embedding [V, H], B is [H, R] and A is [R, V].
    """

    a: str
    b: str
    scaling: float
    magnitude: str | None = None
    is_transposed: bool = False
    is_embedding: bool = False


@dataclass(frozen=True)
class Change:
    """How an adapter changes one tensor: first ``replaced_by`` one of its file, then ``low_rank`` or ``added`` to.

    ``added``: a vector of the file, times a factor.
    """

    replaced_by: str | None = None
    low_rank: LowRank | None = None
    added: tuple[str, float] | None = None


@dataclass(frozen=True)
class Adapter:
    """An adapter in ``folder``: the ``tensors`` of its file, and the ``changes`` by the names of the model's tensors.

    ``warnings`` are for the user, before the model is quantized.
    """

    folder: Path
    config: AdapterConfig
    tensors: dict[str, TensorHeader]
    changes: dict[str, Change]
    warnings: tuple[str, ...] = ()


def adapter_digest(folder: Path) -> str:
    """Return ``sha256:...`` of the settings and the weights of the adapter in ``folder``."""
    hashed = [(name, sha256(folder / name)) for name in (ADAPTER, WEIGHTS)]
    return f"sha256:{hashlib.sha256(json.dumps(hashed).encode()).hexdigest()}"


def read_adapter(
    folder: Path, model: Path, model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> Adapter:
    """Read the adapter in ``folder`` for the model at the path ``model`` with these float ``tensors``.

    Raises ModelError: ``no_adapter``, ``invalid_adapter``, ``unsupported_adapter``, ``adapter_of_other_model``.
    """
    check_adapter_files(folder)
    config = parse_adapter_config(read_json(folder / ADAPTER, "no_adapter"))
    held = read_safetensors_header(folder / WEIGHTS)
    changes = _Matching(config, held, tensors).changes()
    _check_ties(changes, model_config, tensors)
    warnings = (*_warn_of_base(config, model, model_config), *_warn_of_template(folder, model))
    return Adapter(folder, config, held, changes, warnings)


def check_adapter_files(folder: Path) -> None:
    """Raise ModelError ``no_adapter`` unless ``folder`` holds an adapter, and as ``check_files`` does."""
    if not (folder / ADAPTER).is_file():
        raise ModelError(
            f"There is no PEFT adapter in {folder}.",
            code="no_adapter",
            hint=f"Name the folder that holds {ADAPTER} and {WEIGHTS}, or the adapter's id on the Hub (org/name).",
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"There is no {WEIGHTS} beside {ADAPTER} in {folder}.",
            code="no_adapter",
            hint="Save the adapter with PEFT as safetensors. Pickled weights (adapter_model.bin) are never read.",
        )
    check_files(folder)


class _Matching:
    """Finds the place of every tensor of an adapter in the model with ``tensors``."""

    def __init__(
        self, config: AdapterConfig, held: Mapping[str, TensorHeader], tensors: Mapping[str, TensorHeader]
    ) -> None:
        self._config, self._held, self._tensors = config, held, tensors
        self._names = _names_by_tail(tensors)
        lists = block_lists(tensors)
        self._transposed = find_conv1d(tensors, lists[0].prefix) if lists else set()
        self._parts: dict[str, dict[str, str]] = {}
        self._changes: dict[str, Change] = {}

    def changes(self) -> dict[str, Change]:
        for key in sorted(self._held):
            self._sort(key)
        for module, parts in self._parts.items():
            self._take(module, parts)
        if not self._changes:
            raise invalid(f"{WEIGHTS} holds no tensors.")
        self._check_complete()
        return self._changes

    def _sort(self, key: str) -> None:
        """Note a tensor of the file: a part of a module's adapter, or the new values of a tensor of the model."""
        name = key.removeprefix(PREFIX)
        if name == key:
            raise invalid(f"{WEIGHTS} holds '{key}', but PEFT's names begin with '{PREFIX}'.")
        if match := _PART.fullmatch(name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")):
            self._parts.setdefault(match[1], {})[match[2]] = key
        elif ".lora_" in name or ".token_adapter." in name or ".modules_to_save." in name:
            raise unsupported(f"{WEIGHTS} holds '{key}', which is no tensor of a LoRA or DoRA adapter", MERGE_WITH_PEFT)
        else:
            self._replace(name.replace(".base_layer.", "."), key)

    def _replace(self, name: str, key: str) -> None:
        place = self._place(name)
        new, old = self._held[key].shape, self._tensors[place].shape
        if new != old:
            is_table = is_embedding(place) or is_head(place)
            if is_table and len(new) == len(old) == 2 and new[1:] == old[1:]:
                raise unsupported(
                    f"It was trained with another number of tokens: its '{name}' has {new[0]} rows, and that of the "
                    f"model has {old[0]}",
                    MERGE_WITH_PEFT,
                )
            raise self._misfit(key, new, f"'{place}' of the model has the shape {list(old)}")
        self._changes[place] = Change(replaced_by=key)

    def _take(self, module: str, parts: Mapping[str, str]) -> None:
        """Note the low-rank change of the weight of ``module``, and that of its bias."""
        config, place = self._config, self._place(f"{module}.weight")
        if not config.targets(module):
            raise invalid(
                f"{WEIGHTS} holds tensors for '{module}', but {ADAPTER} does not name this module (target_modules, "
                "exclude_modules, layers_to_transform)."
            )
        is_table = "lora_embedding_A" in parts
        a, b = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
        expected = {a, b}
        expected |= {"lora_magnitude_vector"} if config.use_dora else set()
        expected |= {"lora_B.bias"} if config.lora_bias and not is_table else set()
        if other := sorted(parts.keys() ^ expected):
            fault = "is missing" if other[0] in expected else f"does not fit the settings in {ADAPTER}"
            raise invalid(f"{WEIGHTS}: {other[0]} of '{module}' {fault}.")
        if is_table and config.use_dora:
            raise unsupported(f"It changes the embedding '{module}' by DoRA", MERGE_WITH_PEFT)
        self._check_shapes(module, place, parts, a, b)
        low_rank = LowRank(
            parts[a],
            parts[b],
            config.scaling(module),
            parts.get("lora_magnitude_vector"),
            is_transposed=place in self._transposed,
            is_embedding=is_table,
        )
        self._changes[place] = replace(self._changes.get(place, Change()), low_rank=low_rank)
        if (key := parts.get("lora_B.bias")) is not None:
            self._add_bias(module, place.removesuffix("weight") + "bias", key)

    def _add_bias(self, module: str, place: str, key: str) -> None:
        if place not in self._tensors:
            raise unsupported(
                f"It adds a bias to '{module}' (lora_bias), which has none",
                "Train it without lora_bias: PEFT cannot merge it either.",
            )
        new, old = self._held[key].shape, self._tensors[place].shape
        if new != old:
            raise self._misfit(key, new, f"'{place}' of the model has the shape {list(old)}")
        change = self._changes.get(place, Change())
        self._changes[place] = replace(change, added=(key, self._config.scaling(module)))

    def _check_shapes(self, module: str, place: str, parts: Mapping[str, str], a: str, b: str) -> None:
        rank, shape = self._config.rank(module), self._tensors[place].shape
        if len(shape) != 2:
            raise unsupported(
                f"It changes '{place}', whose shape {list(shape)} is not that of a matrix", MERGE_WITH_PEFT
            )
        is_turned = place in self._transposed or a == "lora_embedding_A"
        num_out, num_in = reversed(shape) if is_turned else shape
        wanted = {a: (rank, num_in), b: (num_out, rank), "lora_B.bias": (num_out,), "lora_magnitude_vector": (num_out,)}
        for part, key in parts.items():
            if self._held[key].shape != wanted[part]:
                what = f"the rank {rank} in {ADAPTER} and '{place}' with the shape {list(shape)} in the model"
                raise self._misfit(key, self._held[key].shape, f"it must be {list(wanted[part])}: {what}")

    def _check_complete(self) -> None:
        """Raise ModelError if a module that the settings name is in the model, but not in the file."""
        config = self._config
        named = config.target_modules if isinstance(config.target_modules, list) else []
        changed = {name.rpartition(".")[0] for name in self._changes}
        for module in dict.fromkeys((*named, *(config.modules_to_save or ()))):
            of_model = [name for name in self._tensors if f".{module}." in f".{name}"]
            if of_model and not any(f".{module}." in f".{name}." for name in changed):
                raise invalid(f"{ADAPTER} names the module '{module}', but {WEIGHTS} holds nothing for it.")

    def _place(self, name: str) -> str:
        """Return the model's name of the tensor that Transformers calls ``name``: the parts of a VLM moved once."""
        if name in self._tensors:
            return name
        head, tail = _split(name)
        found = [place for place, other in self._names.get(tail, ()) if head <= other or other <= head]
        if len(found) == 1:
            return found[0]
        if is_head(name):
            raise unsupported(
                f"It changes the output projection ('{name}'), which is the embedding itself in this model (tied)",
                MERGE_WITH_PEFT,
            )
        raise self._of_other_model(f"The adapter changes '{name}', which the model does not have.")

    def _misfit(self, key: str, shape: tuple[int, ...], why: str) -> ModelError:
        return self._of_other_model(
            f"The adapter does not fit the model: its '{key}' has the shape {list(shape)}, but {why}."
        )

    def _of_other_model(self, what: str) -> ModelError:
        base = self._config.base_model_name_or_path or "see its card"
        hint = f"Give the model that the adapter was trained on: {base}."
        return ModelError(what, code="adapter_of_other_model", hint=hint)


def _split(name: str) -> tuple[frozenset[str], str]:
    """Return the parts before the first numbered list in a tensor's name as a set, and the rest of the name."""
    match = _TAIL.fullmatch(name)
    return (frozenset(), name) if match is None else (frozenset((match[1] or "").split(".")) - {""}, match[2])


def _names_by_tail(names: Iterable[str]) -> dict[str, list[tuple[str, frozenset[str]]]]:
    found: dict[str, list[tuple[str, frozenset[str]]]] = {}
    for name in names:
        head, tail = _split(name)
        found.setdefault(tail, []).append((name, head))
    return found


def _check_ties(
    changes: Mapping[str, Change], model_config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> None:
    """Raise ModelError for a change of an embedding that is the output projection as well."""
    if any(map(is_head, tensors)):
        return
    sizes = ModelConfig(model_config).vocab_sizes
    for name in changes:
        if is_embedding(name) and tensors[name].shape[0] in sizes:
            raise unsupported(
                f"It changes the embedding '{name}', which is the output projection of this model as well (tied)",
                MERGE_WITH_PEFT,
            )


def _warn_of_base(config: AdapterConfig, model: Path, model_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a warning if the adapter names another base model. Copies of one model have many names: no error."""
    base, name = config.base_model_name_or_path or "", model_name(model)
    if base and _last(base) in (_last(name), _last(str(model_config.get("_name_or_path") or ""))):
        return ()
    trained_on = f"was trained on '{base}'" if base else "does not say which model it was trained on"
    return (
        f"The adapter {trained_on}, and is merged into '{name}'. Names and shapes of the tensors fit. The result is of "
        "use only if this is the same model.",
    )


def _last(name: str) -> str:
    return name.lower().rstrip("/").rpartition("/")[2]


def _warn_of_template(folder: Path, model: Path) -> tuple[str, ...]:
    """Return a warning if the adapter comes with a chat template that is not the model's."""
    own = _chat_template(folder)
    if own is None or own == _chat_template(model):
        return ()
    return (
        "The adapter's folder has a chat template that differs from the model's. The result keeps that of the model: "
        f"if the adapter was trained with its own, put it into the model's folder first ({_TEMPLATE}).",
    )


def _chat_template(folder: Path) -> str | None:
    if (folder / _TEMPLATE).is_file():
        return read_bytes(folder / _TEMPLATE).decode("utf-8", "replace")
    if not (folder / _TOKENIZER).is_file():
        return None
    template = read_json(folder / _TOKENIZER, "no_tokenizer", max_bytes=MAX_SIDE_FILE_BYTES).get("chat_template")
    return template if isinstance(template, str) else None
