"""Streams the rows of a dataset on the Hugging Face Hub with the ``datasets`` library. No torch.

A dataset is named as in ``datasets.load_dataset``: source, config, split, column. Its revision is resolved to a commit
once. Only data files are read: datasets 5 runs no dataset's Python script. The library, which loads Arrow, is imported
when a dataset is opened; names and commits need only huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from quantcore.config.texts import TextPart
from quantcore.config.time_limits import HUB_S
from quantcore.data.columns import choose_column
from quantcore.data.files import Row
from quantcore.errors import CalibrationError, QuantError
from quantcore.hub.download import TOKEN
from quantcore.hub.session import hub_api

_PILE = {"source": "mit-han-lab/pile-val-backup", "split": "validation", "column": "text"}
_WIKITEXT = {"source": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "train", "column": "text"}
ALIASES: dict[str, dict[str, str]] = {
    "pileval": _PILE,
    "pileval_for_awq_benchmark": _PILE,
    "wikitext": _WIKITEXT,
    "wikitext_for_gptq_benchmark": _WIKITEXT,
    "cnn_dailymail": {"source": "abisee/cnn_dailymail", "config": "3.0.0", "split": "train", "column": "article"},
    "HuggingFaceH4/ultrachat_200k": {
        "source": "HuggingFaceH4/ultrachat_200k",
        "split": "train_sft",
        "column": "messages",
    },
    "ScienceQA": {"source": "derek-thomas/ScienceQA", "split": "train", "column": "question"},
}
"""The names of calibration sets in AMD Quark's script. Fields of a request take precedence over these."""

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(f"(?:{_PART}/)?{_PART}")
_SHA = re.compile("[0-9a-f]{40}")


def is_hub_name(source: str) -> bool:
    """Return True for ``name`` and ``org/name`` as the Hub allows them: never for a path or an address."""
    return _NAME.fullmatch(source) is not None and not re.search(r"--|\.\.|\.git$", source)


def resolve(text: TextPart) -> TextPart:
    """Resolve an alias, and pin the commit that the dataset has now. This takes one request to the Hub.

    Raises CalibrationError: ``invalid_dataset_name``, ``hub_*`` (see ``hub.hub_errors``).
    """
    options = text.model_dump(exclude_none=True)
    alias = ALIASES.get(text.source, {})
    text = TextPart(**{**alias, **options, **({"source": alias["source"]} if alias else {})})
    if not is_hub_name(text.source):
        raise CalibrationError(
            f"'{text.source[:100]}' is not a source of calibration text.",
            code="invalid_dataset_name",
            hint="Use builtin, the absolute path of a file, or a dataset on the Hub: org/name.",
            field="/calibration/source",
            allowed=("builtin", *ALIASES),
        )

    from quantcore.hub.hub_errors import explained

    revision = text.revision or "main"
    try:
        with explained(text.source, revision, kind="dataset"):
            info = hub_api().dataset_info(text.source, revision=revision, timeout=HUB_S)
            if info.sha is None or not _SHA.fullmatch(info.sha):
                raise ValueError("the answer names no commit")
    except QuantError as error:
        error.field = "/calibration/" + ("revision" if error.code == "hub_revision_not_found" else "source")
        raise
    return text.model_copy(update={"revision": info.sha})


def is_resolved(text: TextPart) -> bool:
    """Return True if its dataset is named with a commit, as ``resolve`` does."""
    return text.revision is not None and _SHA.fullmatch(text.revision) is not None


def read_rows(text: TextPart, others: Iterable[str] = ()) -> Iterator[Row]:
    """Yield the rows of one split of a resolved dataset as they arrive, in order, with only the text column.

    ``others`` are columns that they have as well, if the dataset has them; images and sound are not decoded.

    Raises CalibrationError: ``datasets_not_installed``, ``unknown_dataset_config``, ``unknown_split``,
    ``no_text_column``, ``unsupported_dataset``, ``hub_*``.
    """
    rows = _open(text, frozenset(others))
    number = 0
    while True:
        try:
            values = next(rows)
        except StopIteration:
            return
        except Exception as error:  # from the library, Arrow or the connection: a file can cause any error
            raise _explain(error, text) from error
        number += 1
        yield Row(f"Row {number}", values)


def _open(text: TextPart, others: frozenset[str]) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise CalibrationError(
            f"'{text.source}' is not a file, and reading a Hub dataset needs the datasets library.",
            code="datasets_not_installed",
            hint="pip install 'bitfoundry[engine]', or use 'builtin' or a file.",
        ) from error
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(
            text.source, text.config, revision=text.revision, streaming=True, token=TOKEN.get()
        )
        rows = splits[_choose_split(list(splits), text.split)]
        rows = rows.decode(False) if rows.features else rows  # pictures stay files
        names = rows.column_names or list(next(iter(rows)))
        column = choose_column([name for name in names if name not in others], text.column)
        return iter(rows.select_columns([column, *others.intersection(names)]))
    except QuantError:
        raise
    except Exception as error:
        raise _explain(error, text) from error


def _choose_split(splits: list[str], split: str | None) -> str:
    if split is None and ("train" in splits or len(splits) == 1):
        return "train" if "train" in splits else splits[0]
    if split in splits:
        return str(split)
    raise CalibrationError(
        f"The dataset has no split '{split}'." if split else "The dataset has several splits, but none called train.",
        code="unknown_split",
        hint=f"Its splits: {', '.join(splits)}.",
        field="/calibration/split",
        allowed=splits,
    )


def _explain(error: Exception, text: TextPart) -> QuantError:
    import httpx2

    from quantcore.hub.hub_errors import explain, gated

    if isinstance(error, QuantError):
        return error
    said, name = str(error), text.source
    configs = re.search(r"(?:Available: |among the available configs: )(\[.*?\])", said, re.DOTALL)
    if configs:
        names = re.findall(r"'([^']+)'", configs[1])
        return CalibrationError(
            f"The dataset '{name}' has several configs; "
            + (f"'{text.config}' is not one of them." if text.config else "say which."),
            code="unknown_dataset_config",
            hint=f"Its configs: {', '.join(names)}.",
            field="/calibration/config",
            allowed=names,
        )
    cause: BaseException | None = error
    while cause is not None:  # the library wraps what happened on the wire
        if isinstance(cause, httpx2.HTTPError | ConnectionError | TimeoutError):
            return explain(cause, name, str(text.revision), kind="dataset")
        cause = cause.__cause__ or cause.__context__
    if "is a gated dataset" in said:  # its cause is dropped on the way
        return gated(name, "dataset")
    why = "it is a Python script" if "script" in said else f"{type(error).__name__}"
    return CalibrationError(
        f"The dataset '{name}' cannot be read: {why}.",
        code="unsupported_dataset",
        hint="Its files must be data (Parquet, JSON, CSV, text); code in a dataset is never run.",
        field="/calibration/source",
    )
