"""``quantcore.quantize``: a model quantized in one call, from a notebook or a script."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from quantcore.cli.explain import explained
from quantcore.cli.main import asked_of
from quantcore.cli.resuming import Progress
from quantcore.cli.running import Asked
from quantcore.cli.several_presets import names_of
from quantcore.errors import ConfigError
from quantcore.report.data_frame import data_frame
from quantcore.report.html import page
from quantcore.report.values import Report

HEIGHT = "40rem"


@dataclass(frozen=True)
class LocalResult:
    """The ``folder`` with a quantized model, and the ``report`` on it, which a notebook shows."""

    folder: Path
    report: Report

    def __repr__(self) -> str:
        summary = self.report.summary
        size = f"{summary.size_before_bytes / 1e6:.1f} MB -> {summary.size_after_bytes / 1e6:.1f} MB"
        verdict = "not measured" if summary.verdict is None else str(summary.verdict)
        return f"{self.folder}: {size}, {verdict}"

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{HEIGHT};border:0"
        return f'<iframe srcdoc="{escape(page(self.report))}" style="{style}"></iframe>'

    def to_pandas(self) -> Any:
        """Return the layers as a pandas DataFrame, one row a layer. Raises ConfigError if pandas is not installed."""
        return data_frame(layer.to_dict() for layer in self.report.layers)


def quantize(
    model: str | Path, preset: str | None = None, *, output: str | Path | None = None, **settings: Any
) -> LocalResult:
    """Quantize a model, verify the result and write it, as ``bitfoundry quantize MODEL PRESET -o OUT`` does.

    ``model`` is a folder, a GGUF file or a model on the Hub. ``settings`` are the command's flags by name, such as
    ``effort="best"`` or ``exclude_layers=["*.o_proj"]``; True gives a flag without a value. With ``runtime`` and
    ``device`` the scheme is chosen for that goal, and the settings are those of ``bitfoundry auto``. A call that was
    interrupted continues after its last saved block. Raises ConfigError for unknown settings, and the errors of the
    command.
    """
    from quantcore.cli.console import progress_display

    _check_single(preset)
    arguments = [str(model), *([] if preset is None else [preset]), *([] if output is None else ["-o", str(output)])]
    asked = _asked("auto" if "runtime" in settings else "quantize", [*arguments, *_flags(settings)])
    progress = Progress(asked.command)
    with progress_display() as emit, explained(emit) as noting:
        report = asked.quantized(asked.task(progress), progress, noting)
    assert report is not None  # one process
    return LocalResult(Path(asked.options.output_dir), report)


def _check_single(preset: object) -> None:
    """Raise ConfigError for several presets, as a list or with commas: each call has one result."""
    names = preset if isinstance(preset, list | tuple | set) else names_of(str(preset))
    if len(names) > 1:
        listed = ", ".join(map(repr, names))
        raise ConfigError(
            f"quantcore.quantize takes one preset, and {len(names)} are given: {listed}.",
            code="invalid_config",
            hint=f"Call it for each: `[quantcore.quantize(model, preset) for preset in ({listed})]`.",
            field="/config/preset",
        )


def _flags(settings: dict[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if value is None or value is False:
            continue
        yield f"--{name}"
        if value is not True:
            yield from map(str, value if isinstance(value, list | tuple) else [value])


def _asked(command: Any, arguments: list[str]) -> Asked:
    """Return what the arguments ask for. Raises ConfigError with the words of the command line."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return asked_of(command, arguments)
    except SystemExit:
        message = said.getvalue().splitlines()[0].partition("error: ")[2]
        hint = f"`bitfoundry {command} --help` lists all settings."
        raise ConfigError(f"{message[:1].upper()}{message[1:]}", code="invalid_settings", hint=hint) from None
