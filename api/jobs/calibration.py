"""Resolves the text that a request names for calibration or evaluation. Checks it without reading it."""

from __future__ import annotations

from collections.abc import Callable

from api.http.deps import Context
from api.settings import Settings
from api.store.accounts import datasets
from api.store.accounts.audit import Caller
from quantcore.config.job_spec import Evaluation
from quantcore.config.quantization import Config
from quantcore.config.texts import BUILTIN, CalibrationConfig, TextPart, at_part, is_dataset_id
from quantcore.data import hub_dataset
from quantcore.data.columns import no_column
from quantcore.data.files import format_of
from quantcore.data.imatrix import find_imatrix
from quantcore.errors import CalibrationError, QuantError

Locate = Callable[[TextPart], TextPart]


def locator(context: Context, caller: Caller) -> Locate:
    """Return ``locate`` for the texts that this caller may read."""
    return lambda text: locate(text, context, caller)


def locate(text: TextPart, context: Context, caller: Caller) -> TextPart:
    """Return the text to store, with its source resolved.

    A path becomes a real path, an uploaded dataset gets its column, and one on the Hub the commit that its revision
    stands for now. Raises CalibrationError (ModelError ``path_not_allowed``) whose ``field`` points into the request.
    """
    if text.source == BUILTIN:
        return text
    if is_dataset_id(text.source):
        return _find_uploaded(text, context, caller)
    if not text.source.startswith("/"):
        return hub_dataset.resolve(text)
    source = context.settings.find_input(text.source, field="/calibration/source")
    if not source.is_file():
        raise CalibrationError(
            f"There is no data file at {text.source}.",
            code="calibration_not_found",
            hint="Give 'builtin', a data file that the service can read, or the name of a dataset on the Hub.",
            field="/calibration/source",
        )
    format_of(source.name)
    return text.model_copy(update={"source": str(source)})


def locate_calibration(calibration: CalibrationConfig, locate: Locate) -> CalibrationConfig:
    """Return the calibration to store, with every source resolved by ``locate``."""
    located = []
    for number, part in enumerate(calibration.parts):
        with at_part(calibration, number):
            located.append(locate(part))
    return calibration.with_parts(located)


def locate_imatrix(config: Config, settings: Settings) -> Config:
    """Return the config to store, with the real path of its importance matrix, if it has one.

    Raises CalibrationError ``imatrix_not_found``, ModelError ``path_not_allowed``.
    """
    if config.imatrix is None:
        return config
    return config.with_imatrix(str(find_imatrix(settings.find_input(config.imatrix, field="/algo_config"))))


def locate_evaluation(evaluation: Evaluation, locate: Locate) -> Evaluation:
    """Return the evaluation to store, with its own text resolved by ``locate``."""
    text = evaluation.text
    if text is None:
        return evaluation
    try:
        return evaluation.model_copy(update=locate(text).place)
    except QuantError as error:
        error.field = error.field.replace("/calibration/", "/evaluation/", 1)
        raise


def _find_uploaded(text: TextPart, context: Context, caller: Caller) -> TextPart:
    with context.sessions.begin() as session:
        dataset = datasets.find(session, caller.project_id, text.source)
    if dataset is None:
        raise no_such_dataset()
    column = text.column or dataset.text_column
    if column not in dataset.columns:
        raise no_column(column, dataset.columns)
    return text.model_copy(update={"column": column})


def no_such_dataset(field: str = "/calibration/source") -> CalibrationError:
    return CalibrationError(
        "There is no such dataset.",
        code="dataset_not_found",
        hint="Upload it with POST /v1/datasets, or `bitfoundry datasets upload`.",
        field=field,
    )
