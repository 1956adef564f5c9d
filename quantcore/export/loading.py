"""The lines of Python that load an artifact in a program that was tested with such files.

The test results are in ``consumers.json``, which the tests in tests/consumers fill, scheme by scheme and architecture
by architecture. A program has lines for a format if it was seen to read this scheme, or mix of schemes, and this
``model_type`` in it; with experts, or scales of a cache, it must have been both at once. Else the result has only our
own lines, and those of Transformers if it has read these very files. GGUF states the type of every tensor, so a program
that was seen to read each scheme reads any mix of them, and experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quantcore.checkpoint.experts import is_in_stack
from quantcore.config import presets
from quantcore.config.layer_plan import LayerPlan, usual_layers
from quantcore.config.quantization import Config
from quantcore.errors import ConfigError
from quantcore.export.exporter import EXPORTERS, readers_of
from quantcore.export.unread import not_in_vllm

TABLE = Path(__file__).with_name("consumers.json")
Kinds = frozenset[str]

AUTO_CLASS = "AutoModelForCausalLM"
"""The class in the lines for Transformers, by default."""
IN_BFLOAT16 = ", dtype='bfloat16'"
"""What the call of Transformers needs for files that it decodes to bfloat16 whatever the dtype of the model is."""
SENTENCE_TRANSFORMERS = "from sentence_transformers import SentenceTransformer\nmodel = SentenceTransformer({path!r})"
DECOMPRESSED = (
    "from sentence_transformers import SentenceTransformer\nfrom transformers import CompressedTensorsConfig\n"
    "decompressed = {{'quantization_config': CompressedTensorsConfig(run_compressed=False)}}\n"
    "model = SentenceTransformer({path!r}, model_kwargs=decompressed)"
)
"""sentence-transformers calls the model past the hook that would decompress it, so it is loaded decompressed."""
VLLM = "from vllm import LLM\nllm = LLM({path!r})"
TRANSFORMERS = f"from transformers import {AUTO_CLASS}\nmodel = {AUTO_CLASS}.from_pretrained({{path!r}})"
AMD_QUARK = (
    "from quark.torch import import_model_from_safetensors\nmodel = import_model_from_safetensors(None, {path!r})"
)
OURS = "import quantcore\nmodel, config = quantcore.load({path!r})"
UNSEEN = "# llama.cpp's converter laid this file out, but no program was seen to load one of this architecture yet."
GENAI = "import onnxruntime_genai\nmodel = onnxruntime_genai.Model({path!r})"
OTHERS = {
    "vLLM (CPU)": VLLM,
    "AMD Quark": AMD_QUARK,
    "Transformers + GPTQModel": TRANSFORMERS,
    "ONNX Runtime GenAI": GENAI,
}


@dataclass(frozen=True)
class LoadedModel:
    """Properties of a model, other than its layers, that decide which programs load it.

    ``class_name``: the class of Transformers that loads it. ``has_modules``: it is one of sentence-transformers.
    """

    model_type: str
    class_name: str = AUTO_CLASS
    has_modules: bool = False


def load_lines(programs: Mapping[str, str], path: str, *, is_ours: bool = True) -> str:
    """Return the lines of the first of ``programs`` (see ``program_lines``); without any, ours for ``path``.

    If we do not read such files (``is_ours``), it is a comment that says so.
    """
    return next(iter(programs.values()), OURS.format(path=path) if is_ours else UNSEEN)


def at_folder(lines: str, path: str, folder: str) -> str:
    """Return loading ``lines`` for ``path``, a folder of an artifact without quotes in it, with ``folder`` instead."""
    named = re.compile(rf"'{re.escape(path)}((?:/[^']*)?)'")
    return named.sub(lambda match: repr(folder + match[1]), lines, count=1)


def known_refusals(
    export: str, layers: Sequence[LayerPlan], kept: Iterable[str], refused_by_transformers: str | None
) -> dict[str, str]:
    """Return why programs do not load the ``export`` of ``layers``, in a sentence each, by program.

    ``kept``: the names of linear layers that are not quantized. ``refused_by_transformers``: why Transformers did not
    load and run these very files, if that was tried.
    """
    reasons = {"vLLM": not_in_vllm(export, layers, kept)}
    readers = readers_of(export)
    if readers.for_transformers:
        reasons["Transformers"] = refused_by_transformers or readers.not_in_transformers(layers)
    return {program: reason for program, reason in reasons.items() if reason is not None}


def program_lines(
    export: str,
    layers: Sequence[LayerPlan],
    path: str,
    model: LoadedModel,
    *,
    is_read_by_transformers: bool,
    refusals: Container[str] = (),
) -> dict[str, str]:
    """Return the Python lines that load the ``export`` of ``layers`` at ``path`` by program, the main one first.

    A program that was not seen to load such files is left out. ``is_read_by_transformers``: Transformers has read these
    very files, see ``consumer.check_export``. ``refusals``: the programs that do not load it, see ``known_refusals``.
    """
    lines = _program_lines(export, layers, path, model, is_read_by_transformers=is_read_by_transformers)
    if "Transformers" in refusals:
        lines.pop("sentence-transformers", None)  # which loads the model with it
    return {name: text.replace(AUTO_CLASS, model.class_name) for name, text in lines.items() if name not in refusals}


def _program_lines(
    export: str, layers: Sequence[LayerPlan], path: str, model: LoadedModel, *, is_read_by_transformers: bool
) -> dict[str, str]:
    hint, readers = EXPORTERS.get(export).load_hint(path), readers_of(export)
    at_once = any(is_in_stack(layer.name) or layer.config.output_tensors for layer in layers)
    seen = _seen_by(export, frozenset(map(_kind, layers)), model.model_type, at_once=at_once)
    others = {_title(name): text.format(path=path) for name, text in OTHERS.items() if name in seen}
    if readers.main_reads_all or not readers.main:
        own = {"sentence-transformers": SENTENCE_TRANSFORMERS.format(path=path)}
        is_own = model.has_modules and readers.in_transformers
        return {**(own if is_own else {}), readers.main or export: hint, **others}
    lines = {}
    if model.has_modules and "sentence-transformers" in seen:
        lines["sentence-transformers"] = DECOMPRESSED.format(path=path)
    if readers.main in seen:
        lines[_title(readers.main)] = hint
    if is_read_by_transformers and readers.for_transformers:
        lines.setdefault("Transformers", TRANSFORMERS.format(path=path))
    lines = {**lines, **{name: text for name, text in others.items() if name not in lines}}
    if "Transformers" in lines and readers.needs_bfloat16(layers):
        lines["Transformers"] = lines["Transformers"].removesuffix(")") + f"{IN_BFLOAT16})"
    if readers.transformers_package:
        for name in {"Transformers", "sentence-transformers"} & lines.keys():
            lines[name] = lines[name].replace("\n", f"  # pip install {readers.transformers_package}\n", 1)
    return lines


def _title(program: str) -> str:
    """Return the name of a program of the table without the library or the device that it was tested with."""
    return re.split(r" [(+]", program, maxsplit=1)[0]


def kinds_of(config: Config) -> Kinds:
    """Return the kinds of layers in ``config`` that a loading program distinguishes; group sizes do not count."""
    return frozenset(map(_kind, usual_layers(config)))


def _kind(layer: LayerPlan) -> str:
    return re.sub(r"per_group \d+", "per_group", layer.scheme)


def _seen_by(export: str, kinds: Kinds, model_type: str, *, at_once: bool) -> set[str]:
    """Return the programs that were seen to read layers of these ``kinds`` and models of this type (``at_once``)."""
    rows = [(program, own_type, own) for program, own_format, own_type, own in _rows() if own_format == export]
    of_type = {program for program, own_type, _ in rows if own_type == model_type}
    if readers_of(export).types_every_tensor:
        known = {
            program: frozenset().union(*(own for other, _, own in rows if other == program)) for program in of_type
        }
        return {program for program, own_kinds in known.items() if kinds <= own_kinds}
    if at_once:
        return {program for program, own_type, own_kinds in rows if (own_type, own_kinds) == (model_type, kinds)}
    return {program for program, _, own_kinds in rows if own_kinds == kinds and program in of_type}


@cache
def _rows() -> list[tuple[str, str, str, Kinds]]:
    """Return (program, format, model_type, kinds of layers) of every row with a scheme that is known here."""
    rows = json.loads(TABLE.read_text("utf-8"))
    agreeing = [
        (row["consumer"], row["format"], row["model_type"], _kinds_of_row(row)) for row in rows if row["agrees"]
    ]
    return [row for row in agreeing if row[-1]]


def _kinds_of_row(row: dict[str, Any]) -> Kinds:
    """Return the ``layers`` of the row, else those of the preset that its scheme names."""
    if "layers" in row:
        return frozenset(row["layers"])
    name, _, cache_name = row["scheme"].partition(", ")
    try:
        return kinds_of(presets.resolve(name, kv_cache="fp8" if cache_name == "fp8 KV cache" else None))
    except ConfigError:
        return frozenset()
