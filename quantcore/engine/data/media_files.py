"""Opens the images and sounds that calibration data refer to. Nothing in them is trusted."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np

from quantcore.data.messages import Reference
from quantcore.errors import CalibrationError
from quantcore.sandbox.opening import read_bytes

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 << 20
MAX_PIXELS_AT_ONCE = 128 << 20
"""Limit of the images of one window: 0.4 GB in RGB. A few kilobytes can hold an image of 64 million pixels."""
MAX_MEDIA_BYTES = 64 << 20
PCM: dict[int, tuple[type[np.generic], int, int]] = {
    1: (np.uint8, 128, 128),
    2: (np.int16, 0, 1 << 15),
    4: (np.int32, 0, 1 << 31),
}
"""Bytes of a WAV sample -> its type, the value of silence, and the largest distance from that."""


def content_of(reference: Reference, folder: Path | None) -> bytes:
    """Return the bytes of a file of the ``folder``, of a data URL, or those that the data hold themselves.

    Raises CalibrationError ``bad_media``, and ModelError as ``opening.open_file``.
    """
    source = reference.source
    if isinstance(source, bytes):
        return source
    if source.startswith("data:"):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except ValueError as error:  # binascii.Error, or text that is not even ASCII
            raise bad_media("a data URL that is not base64", "data:image/png;base64,...") from error
    if folder is None or "://" in source:
        raise bad_media(f"a link, '{source[:100]}'", "Nothing is downloaded: use a local file or a data URL.")
    try:
        return read_bytes(folder / source, MAX_MEDIA_BYTES, root=folder)
    except FileNotFoundError as error:
        raise bad_media(f"'{source[:100]}', which does not exist", "Paths are relative to the data file.") from error


def image_of(data: bytes) -> Any:
    """Return the image in the bytes of a file, in RGB (a ``PIL.Image``). Raises CalibrationError ``bad_media``."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        if image.width * image.height <= MAX_PIXELS:
            return image.convert("RGB")
    except Exception as error:  # Pillow raises various errors for bad files
        raise bad_media("an image that cannot be read", f"Use one of {', '.join(IMAGE_FORMATS)}.") from error
    raise bad_media(f"an image of {image.width} x {image.height}", f"At most {MAX_PIXELS >> 20} million pixels.")


def samples_of(data: bytes, rate: int) -> np.ndarray[Any, Any]:
    """Return the samples of a WAV file with ``rate`` of them a second, -1 to 1, the mean of its channels.

    Raises CalibrationError ``bad_media``.
    """
    try:
        with wave.open(io.BytesIO(data)) as file:
            dtype, silence, largest = PCM[file.getsampwidth()]
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype).reshape(-1, file.getnchannels())
            found = file.getframerate()
    except (wave.Error, EOFError, KeyError, ValueError) as error:
        raise bad_media("sound that cannot be read", "Use a WAV file with 8-, 16- or 32-bit samples.") from error
    if found != rate:
        raise bad_media(
            f"sound with {found} samples per second", f"This model expects {rate} per second: convert the file."
        )
    values: np.ndarray[Any, Any] = (samples.astype(np.float32) - silence).mean(1) / largest
    return values


def bad_media(what: str, hint: str) -> CalibrationError:
    """Return the error for data that hold something that cannot be used."""
    return CalibrationError(f"it holds {what}.", code="bad_media", hint=hint, field="/calibration/source")
