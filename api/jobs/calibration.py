"""Resolves the text that a request names for calibration or evaluation. Checks it without reading it."""

from __future__ import annotations

from collections.abc import Callable

from api.http.deps import Context
from api.store.accounts import datasets
from api.store.accounts.audit import Caller
from quantcore.config.job_spec import Evaluation
from quantcore.config.quantization import BUILTIN, CalibrationConfig, TextSource, is_dataset_id
from quantcore.data import hub_dataset
from quantcore.data.columns import no_column
from quantcore.data.files import format_of
from quantcore.errors import CalibrationError, QuantError


def locator(context: Context, caller: Caller) -> Callable[[CalibrationConfig], CalibrationConfig]:
    """Return ``locate`` for the texts that this caller may read."""
    return lambda calibration: locate(calibration, context, caller)


def locate(calibration: CalibrationConfig, context: Context, caller: Caller) -> CalibrationConfig:
    """Return the calibration to store, with its source resolved.

    A path becomes a real path, an uploaded dataset gets its column, and one on the Hub the commit that its revision
    stands for now. Raises CalibrationError (ModelError ``path_not_allowed``) whose ``field`` points into the request.
    """
    if calibration.source == BUILTIN:
        return calibration
    if is_dataset_id(calibration.source):
        return _find_uploaded(calibration, context, caller)
    if not calibration.source.startswith("/"):
        return hub_dataset.resolve(calibration)
    source = context.settings.find_input(calibration.source, field="/calibration/source")
    if not source.is_file():
        raise CalibrationError(
            f"There is no data file at {calibration.source}.",
            code="calibration_not_found",
            hint="Give 'builtin', a data file that the service can read, or the name of a dataset on the Hub.",
            field="/calibration/source",
        )
    format_of(source.name)
    return calibration.model_copy(update={"source": str(source)})


def locate_evaluation(evaluation: Evaluation, locate: Callable[[CalibrationConfig], CalibrationConfig]) -> Evaluation:
    """Return the evaluation to store, with its own text resolved by ``locate``."""
    text = evaluation.text
    if text is None:
        return evaluation
    try:
        located = locate(text)
    except QuantError as error:
        error.field = error.field.replace("/calibration/", "/evaluation/", 1)
        raise
    return evaluation.model_copy(update={name: getattr(located, name) for name in TextSource.model_fields})


def _find_uploaded(calibration: CalibrationConfig, context: Context, caller: Caller) -> CalibrationConfig:
    with context.sessions.begin() as session:
        dataset = datasets.find(session, caller.project_id, calibration.source)
    if dataset is None:
        raise no_such_dataset()
    column = calibration.column or dataset.text_column
    if column not in dataset.columns:
        raise no_column(column, dataset.columns)
    return calibration.model_copy(update={"column": column})


def no_such_dataset(field: str = "/calibration/source") -> CalibrationError:
    return CalibrationError(
        "There is no such dataset.",
        code="dataset_not_found",
        hint="Upload it with POST /v1/datasets, or `bitfoundry datasets upload`.",
        field=field,
    )
