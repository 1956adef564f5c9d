"""From what a request names to the text that calibrates: checked as far as that goes without reading it."""

from __future__ import annotations

from api.settings import Settings
from quantcore.calibration import hub_dataset
from quantcore.calibration.files import format_of
from quantcore.config import BUILTIN, CalibrationConfig
from quantcore.errors import CalibrationError


def locate(calibration: CalibrationConfig, settings: Settings) -> CalibrationConfig:
    """What to store: a path as a real path, a dataset on the Hub with the commit that its revision stands for now.

    Raises CalibrationError (ModelError ``path_not_allowed``) whose ``field`` points into the request.
    """
    if calibration.source == BUILTIN:
        return calibration
    if not calibration.source.startswith("/"):
        return hub_dataset.resolve(calibration)
    source = settings.find_input(calibration.source, field="/calibration/source")
    if not source.is_file():
        raise CalibrationError(
            f"There is no calibration file at {calibration.source}.",
            code="calibration_not_found",
            hint="Give 'builtin', a data file that the service can read, or the name of a dataset on the Hub.",
            field="/calibration/source",
        )
    format_of(source.name)
    return calibration.model_copy(update={"source": str(source)})
