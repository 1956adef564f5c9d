"""Where a job's text comes from: one source, or several that each give a share of the calibration windows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import not_
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StrictStr
from pydantic import model_validator as validator

from quantcore.config.values import Settings
from quantcore.errors import ConfigError, QuantError

BUILTIN = "builtin"
DATASET_ID = "^dst_[0-9a-f]{32}$"
MAX_SOURCES = 16


def is_dataset_id(source: str) -> bool:
    """Return True for the id of a dataset that was uploaded to the service."""
    return re.fullmatch(DATASET_ID, source) is not None


SourceName = Annotated[str, Field(min_length=1, max_length=4096)]


class TextSource(Settings):
    """The location of a text. ``CalibrationConfig`` says what each field can be."""

    source: SourceName | None = None
    config: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    split: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")] | None = None
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = None

    @validator(mode="after")
    def _name_one_place(self) -> Self:
        names = [name for name in ("config", "split", "revision", "column") if getattr(self, name) is not None]
        of_hub = [name for name in names if name != "column"]
        if self.source is None and names:
            raise ValueError(f"{', '.join(names)} set without a source")
        is_file = self.source is not None and (self.source.startswith(("/", ".")) or is_dataset_id(self.source))
        if of_hub and (is_file or self.source == BUILTIN):
            raise ValueError(f"{', '.join(of_hub)} set for '{self.source}', which is not a dataset on the Hub")
        if self.source == BUILTIN and self.column is not None:
            raise ValueError("the builtin text has no column")
        return self

    @property
    def place(self) -> dict[str, Any]:
        """The fields of the location alone."""
        return {name: getattr(self, name) for name in TextSource.model_fields}


class TextPart(TextSource):
    """One source of a text. ``share`` is its weight among the sources; shares need not add up to 1."""

    source: SourceName
    share: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 1.0


TAKEN_NAMES = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Names that arguments of a template cannot have: Transformers' ``apply_chat_template`` takes them for itself."""


def _check_names(arguments: dict[str, Any]) -> dict[str, Any]:
    if wrong := [name for name in arguments if not name.isidentifier() or name in TAKEN_NAMES]:
        raise ValueError(f"'{wrong[0][:100]}' is not a valid name for an argument of a chat template")
    return arguments


Scalar = StrictBool | StrictInt | Annotated[float, Field(strict=True, allow_inf_nan=False)] | StrictStr
ChatArguments = Annotated[
    dict[str, Scalar], AfterValidator(_check_names), Field(max_length=32, examples=[{"enable_thinking": False}])
]
"""Arguments of a chat template beside the messages, such as ``enable_thinking``. The name is vLLM's."""


class CalibrationConfig(TextSource):
    """The text that the engine learns activations from: ``num_samples`` windows of ``seq_len`` tokens.

    ``source``: ``builtin`` (prose, dialogues, code and several languages); the path of a ``.txt``, ``.jsonl``,
    ``.json``, ``.csv`` or ``.parquet`` file, or of one of these as ``.gz``; the id of an uploaded dataset; or a dataset
    on the Hugging Face Hub, named as in ``datasets``: with ``config``, ``split`` and ``revision`` (by default its only
    config, ``train``, ``main``). ``column`` holds the text of a row: a string, or a chat as a list of messages (by
    default ``text``, else ``messages``). ``sources``, instead of these fields: several sources, each with a ``share``
    of the windows. ``chat_template_kwargs``: arguments of the model's template, which renders the chats, such as
    ``enable_thinking``.
    """

    source: SourceName | None = BUILTIN
    sources: Annotated[tuple[TextPart, ...], Field(max_length=MAX_SOURCES)] = Field(default=(), exclude_if=not_)
    chat_template_kwargs: ChatArguments = Field(default_factory=dict, exclude_if=not_)
    num_samples: Annotated[StrictInt, Field(ge=1, le=65536)] = 32
    seq_len: Annotated[StrictInt, Field(ge=8, le=131072)] = 512
    seed: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] = 0

    @validator(mode="before")
    @classmethod
    def _take_the_place_of_source(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or not fields.get("sources"):
            return fields
        if names := [name for name in TextSource.model_fields if fields.get(name) is not None]:
            raise ValueError(f"{', '.join(names)} set together with sources; set this in each source instead")
        return {**fields, "source": None}

    @validator(mode="after")
    def _make_sense(self) -> Self:
        if self.source is None and not self.sources:
            raise ValueError("add a source")
        places = [tuple(part.place.items()) for part in self.sources]
        for part, count, place in zip(self.sources, self.counts, places, strict=False):
            if count == 0:
                raise ValueError(
                    f"'{part.source}' gets none of the {self.num_samples} samples: increase its share or num_samples"
                )
            if places.count(place) > 1:
                raise ValueError(f"'{part.source}' is listed twice: list it once, with a larger share")
        return self

    @property
    def parts(self) -> tuple[TextPart, ...]:
        """The sources: ``sources``, or the only one."""
        return self.sources or (part_of(self),)

    @property
    def counts(self) -> list[int]:
        """The number of calibration windows of each of the ``parts``."""
        return apportion(self.num_samples, [part.share for part in self.parts])

    def with_parts(self, parts: Sequence[TextPart]) -> Self:
        """Return this config with other locations, one for each of the ``parts``."""
        return self.model_copy(update={"sources": tuple(parts)} if self.sources else parts[0].place)


def part_of(text: TextSource) -> TextPart:
    """Return the location of ``text``, which has a source, as the only part of a text."""
    return TextPart(**text.place)


@contextmanager
def at_part(calibration: CalibrationConfig, number: int) -> Iterator[None]:
    """Let errors inside name the part of ``calibration`` at fault, if there are several sources."""
    try:
        yield
    except QuantError as error:
        if calibration.sources:
            source, name = calibration.sources[number].source, error.field.rpartition("/")[2]
            if source not in error.message:
                error.message = f"Source '{source[:100]}': {error.message}"
            if name in TextSource.model_fields:
                error.field = f"/calibration/sources/{number}/{name}"
        raise


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Divide ``total`` by the shares into whole numbers that add up to it (the largest-remainder method)."""
    exponent = math.frexp(max(shares, default=0.0))[1]  # of the largest share: sums of large ones would overflow
    shares = [math.ldexp(share, -exponent) for share in shares]
    exact = [total * share / (sum(shares) or 1) for share in shares]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(shares)), key=lambda at: counts[at] - exact[at])
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return counts


_SHARED = re.compile(r"(.+?)((?::(?:config|split|revision|column)=[^:,]+)*):(\d+(?:\.\d*)?|\.\d+)(?:,|$)")


def parse_sources(text: str) -> dict[str, Any]:
    """Return ``source`` or ``sources`` of the text of a flag: NAME, or ``NAME[:FIELD=VALUE...]:SHARE,...``.

    A text that does not end with ``:NUMBER`` is one source as it stands. Raises ConfigError ``invalid_sources``.
    """
    if not _SHARED.search(text):
        return {"source": text}
    parts: list[dict[str, Any]] = []
    end = 0
    while match := _SHARED.match(text, end):
        name, fields, share = match.groups()
        settings = dict(field.split("=", 1) for field in fields.split(":")[1:])
        parts.append({"source": name, **settings, "share": float(share)})
        end = match.end()
    wrong = text[end:] or next((part["source"] for part in parts if "," in part["source"] or not part["share"]), None)
    if wrong is not None or text.endswith(","):
        raise ConfigError(
            f"'{(wrong or text)[:100]}' is not a source with a share above 0.",
            code="invalid_sources",
            hint="Each source needs a share: chats.jsonl:0.75,org/code:column=content:0.25.",
            field="/calibration/sources",
        )
    return {"sources": parts}
