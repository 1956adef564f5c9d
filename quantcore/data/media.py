"""Cuts chats that hold images or sound into token windows, as the model's own processor reads them.

A window has the tokens of one or more documents. Its *media* are what the processor makes of their images and sound, by
the names of the model's inputs, such as ``pixel_values``. Tokens called placeholders stand for them in the text.
"""

from __future__ import annotations

import base64
import binascii
import io
import wave
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from quantcore.checkpoint.libraries import tokenizer_files
from quantcore.checkpoint.opening import read_bytes
from quantcore.data.chat import chat_renderer
from quantcore.data.documents import Document, at_row
from quantcore.data.messages import MEDIA_KINDS
from quantcore.errors import CalibrationError, ModelError, QuantError, is_failure, reason_of
from quantcore.model.kinds import Media

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 << 20
MAX_MEDIA_BYTES = 64 << 20
PCM: dict[int, tuple[type[np.generic], int, int]] = {
    1: (np.uint8, 128, 128), 2: (np.int16, 0, 1 << 15), 4: (np.int32, 0, 1 << 31)
}  # fmt: skip
"""Bytes of a WAV sample -> its type, the value of silence, and the largest distance from that."""


@dataclass(frozen=True)
class MediaWindow:
    """Token ids [T] of a window, and its media."""

    ids_T: torch.Tensor
    media: Media


class MediaReader:
    """Reads documents as one model does, of whose folder, ``config`` and tokenizer these are; floats have ``dtype``.

    ``render`` renders chats with images and sound, and ``placeholders`` are the tokens that stand for these.
    ``num_too_long`` counts the documents that were left out, because no window can hold their media, and ``num_cut``
    those of which only the text was read.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._processor = _load_processor(folder)
        self.render = chat_renderer(tokenizer, arguments, with_media=True)
        self._dtype = dtype
        self._end = str(tokenizer.eos_token or "")
        found = (config.get(f"{kind}_token_{key}") for kind in MEDIA_KINDS for key in ("id", "index"))
        self.placeholders = frozenset(token for token in found if isinstance(token, int))
        self.num_too_long = 0
        self.num_cut = 0

    def windows(self, documents: Iterable[Document], num: int, length: int, folder: Path | None) -> list[MediaWindow]:
        """Cut up to ``num`` windows of ``length`` tokens; paths of images and sound lead into ``folder``, if any.

        A window ends in text: where the media of the next document do not fit, the text of it fills the window. A
        document of which not even a window of its own can hold the media is left out.
        """
        windows: list[MediaWindow] = []
        chosen: list[Document] = []
        for document in documents:
            if len(windows) == num:
                break
            tried = self._read([*chosen, document], folder)
            if self._end_of_media(tried) > length:
                if not chosen:
                    self.num_too_long += 1
                    continue
                self.num_cut += 1
                document = document.without_media()
                tried = self._read([*chosen, document], folder)
            chosen.append(document)
            if len(tried.ids_T) >= length:
                windows.append(_cut(tried, length))
                chosen = []
        return windows

    def is_placeholder(self, ids_NT: torch.Tensor) -> torch.Tensor:
        """Return a mask of the tokens that stand for images or sound."""
        return torch.isin(ids_NT, torch.tensor(sorted(self.placeholders), dtype=ids_NT.dtype))

    def _end_of_media(self, window: MediaWindow) -> int:
        """Return the number of tokens up to the last placeholder; 0 without any."""
        places = self.is_placeholder(window.ids_T).nonzero()
        return int(places[-1]) + 1 if len(places) else 0

    def _read(self, documents: Sequence[Document], folder: Path | None) -> MediaWindow:
        text = "".join(document.text + self._end for document in documents)
        inputs: dict[str, list[Any]] = {kind: [] for kind in MEDIA_KINDS}
        for document in documents:
            for one in document.media:
                with at_row(document.place):
                    data = one.source if isinstance(one.source, bytes) else _bytes_of(one.source, folder)
                    inputs[one.kind].append(_image(data) if one.kind == "image" else self._sound(data))
        with at_row(documents[-1].place):
            return self._process(text, inputs["image"], inputs["audio"])

    def _process(self, text: str, images: list[Any], sounds: list[Any]) -> MediaWindow:
        named: dict[str, Any] = {"images": [images]} if images else {}
        if sounds:
            named |= {"audio": sounds, "sampling_rate": self._processor.feature_extractor.sampling_rate}
        try:
            read = dict(self._processor(text=[text], return_tensors="pt", add_special_tokens=False, **named))
        except BaseException as error:  # the processor's own code, on data of anybody
            if not is_failure(error):
                raise
            raise CalibrationError(
                f"the model's processor cannot read it: {reason_of(error)}",
                code="bad_media",
                hint="Check that this model reads images or sound of this kind, and as many of them.",
                field="/calibration/source",
            ) from error
        ids_T = read.pop("input_ids")[0]
        if named and not self.is_placeholder(ids_T).any():
            raise _bad("images or sound, and config.json names no token that stands for them", "Give data of text.")
        read.pop("attention_mask", None)  # nothing is padded
        floats = {name: value.to(self._dtype) if value.is_floating_point() else value for name, value in read.items()}
        return MediaWindow(ids_T, floats)

    def _sound(self, data: bytes) -> np.ndarray[Any, Any]:
        """Return the samples of a WAV file, -1 to 1, the mean of its channels. Raises CalibrationError."""
        rate = self._processor.feature_extractor.sampling_rate
        try:
            with wave.open(io.BytesIO(data)) as file:
                dtype, silence, largest = PCM[file.getsampwidth()]
                samples = np.frombuffer(file.readframes(file.getnframes()), dtype).reshape(-1, file.getnchannels())
                found = file.getframerate()
        except (wave.Error, EOFError, KeyError, ValueError) as error:
            raise _bad("sound that cannot be read", "Give a WAV file with samples of 8, 16 or 32 bits.") from error
        if found != rate:
            raise _bad(f"sound of {found} samples a second", f"This model hears {rate} a second: convert the file.")
        values: np.ndarray[Any, Any] = (samples.astype(np.float32) - silence).mean(1) / largest
        return values


def _cut(window: MediaWindow, length: int) -> MediaWindow:
    """Return the first ``length`` tokens; what the media have for each token is cut as well."""
    num = len(window.ids_T)
    media = {
        name: value[:, :length] if value.shape[:2] == (1, num) and (value.ndim == 2 or name in PER_TOKEN) else value
        for name, value in window.media.items()
    }
    return MediaWindow(window.ids_T[:length], media)


PER_TOKEN = ("cross_attention_mask",)
"""Inputs of more than two axes of which the second is that of the tokens; of two axes they have the ids' shape."""


def _load_processor(folder: Path) -> Any:
    from transformers import AutoProcessor, ProcessorMixin

    try:
        with tokenizer_files(folder) as scratch:
            processor = AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                str(scratch), local_files_only=True, trust_remote_code=False
            )
    except QuantError:
        raise
    except BaseException as error:  # as for tokenizers
        if not is_failure(error):
            raise
        raise ModelError(
            f"The model's processor of images and sound cannot be loaded: {reason_of(error)}",
            code="no_processor",
            hint="Put its files (processor_config.json, preprocessor_config.json) beside the weights, and install what"
            " it needs: Pillow, and the torchvision that goes with your torch. Or calibrate with text.",
        ) from error
    if not isinstance(processor, ProcessorMixin):
        raise CalibrationError(
            "The calibration data hold images or sound, and this model reads only text.",
            code="holds_media",
            hint="Take a model that sees or hears, or give data of text.",
            field="/calibration/source",
        )
    return processor


def _bytes_of(reference: str, folder: Path | None) -> bytes:
    """Return the content of a data URL, or of a file of the ``folder``."""
    if reference.startswith("data:"):
        try:
            return base64.b64decode(reference.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise _bad("a data URL that is not base64", "data:image/png;base64,...") from error
    if folder is None or "://" in reference:
        raise _bad(f"a link, '{reference[:100]}'", "Nothing is downloaded: give a file beside the data, or a data URL.")
    try:
        return read_bytes(folder / reference, MAX_MEDIA_BYTES, root=folder)
    except FileNotFoundError as error:
        raise _bad(f"'{reference[:100]}', which does not exist", "Paths are relative to the data file.") from error


def _image(data: bytes) -> Any:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        if image.width * image.height <= MAX_PIXELS:
            return image.convert("RGB")
    except Exception as error:  # Pillow raises various errors for bad files
        raise _bad("an image that cannot be read", f"Give one of {', '.join(IMAGE_FORMATS)}.") from error
    raise _bad(f"an image of {image.width} x {image.height}", f"At most {MAX_PIXELS >> 20} million pixels.")


def _bad(what: str, hint: str) -> CalibrationError:
    return CalibrationError(f"it holds {what}.", code="bad_media", hint=hint, field="/calibration/source")
