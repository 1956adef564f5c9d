"""Cuts chats that hold images or sound into token windows, as the model's own processor reads them.

A window has the tokens of one or more documents. Its *media* are what the processor makes of their images and sound, by
the names of the model's inputs, such as ``pixel_values``. Tokens called placeholders stand for them in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from quantcore.checkpoint.private_copies import tokenizer_files
from quantcore.config.texts import TextPart
from quantcore.data.documents import Document, at_row, has_sound
from quantcore.data.messages import MEDIA_KINDS, Reference
from quantcore.engine.data.chat_template import MediaFound, chat_renderer
from quantcore.engine.data.media_files import MAX_PIXELS_AT_ONCE, bad_media, content_of, image_of, samples_of
from quantcore.engine.data.tokenizer import begin_of_text, check_left_out
from quantcore.engine.model.kinds import Media
from quantcore.errors import CalibrationError, ModelError, QuantError, is_failure, reason_of

R = TypeVar("R")


@dataclass(frozen=True)
class MediaWindow:
    """Token ids [T] of a window, and its media."""

    ids_T: torch.Tensor
    media: Media


class MediaReader:
    """Reads documents as one model does, of whose folder, ``config`` and tokenizer these are; floats have ``dtype``.

    ``render`` renders chats with images and sound, and ``placeholders`` are the tokens that stand for these.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any],
        dtype: torch.dtype,
    ) -> None:
        from transformers import AutoProcessor, ProcessorMixin

        self._processor = load_processor(folder, AutoProcessor)
        if not isinstance(self._processor, ProcessorMixin):
            raise CalibrationError(
                "The calibration data contain images or sound, but this model reads only text.",
                code="holds_media",
                hint="Use a vision or audio model, or text data.",
                field="/calibration/source",
            )
        self.render = chat_renderer(tokenizer, arguments, with_media=True)
        self._dtype = dtype
        self._begin, self._end = str(tokenizer.decode(list(begin_of_text(tokenizer)))), str(tokenizer.eos_token or "")
        found = (config.get(f"{kind}_token_{key}") for kind in MEDIA_KINDS for key in ("id", "index"))
        self.placeholders = frozenset(token for token in found if isinstance(token, int))
        self._num_too_long = 0
        self._num_cut = 0

    def windows(self, documents: Iterable[Document], num: int, length: int, folder: Path | None) -> list[MediaWindow]:
        """Cut up to ``num`` windows of ``length`` tokens; paths of images and sound lead into ``folder``, if any.

        A window ends in text: where the media of the next document do not fit, the text of it fills the window. A
        document of which not even a window of its own can hold the media is left out.
        """
        windows: list[MediaWindow] = []
        chosen: list[Document] = []
        num_tokens = 0
        for document in documents:
            if len(windows) == num:
                break
            alone = self._read([document], folder)  # of a window that is read whole later, once
            if num_tokens + self._end_of_media(alone) > length:
                if not chosen:
                    self._num_too_long += 1
                    continue
                document = self._without_media(document)
                alone = self._read([document], folder)
            chosen.append(document)
            num_tokens += len(alone.ids_T)
            if num_tokens < length:
                continue
            window = self._read(chosen, folder)
            while self._end_of_media(window) > length:  # where documents meet, their tokens may be others
                last = max(number for number, one in enumerate(chosen) if one.media)
                chosen[last] = self._without_media(chosen[last])
                window = self._read(chosen, folder)
            num_tokens = len(window.ids_T)
            if num_tokens >= length:
                windows.append(_cut(window, length))
                chosen, num_tokens = [], 0
        return windows

    def _without_media(self, document: Document) -> Document:
        self._num_cut += 1
        return document.without_media()

    @property
    def left_out(self) -> str:
        """A sentence about rows that were not used completely; empty if all were."""
        if not self._num_cut and not self._num_too_long:
            return ""
        return (
            f"Of {self._num_cut} rows only the text was used, because their images or sound did not fit into the "
            f"rest of a window; {self._num_too_long} rows were skipped, because they fit into no window. A larger "
            "seq_len uses more of them."
        )

    def _end_of_media(self, window: MediaWindow) -> int:
        """Return the number of tokens up to the last placeholder; 0 without any."""
        places = is_one_of(self.placeholders, window.ids_T).nonzero()
        return int(places[-1]) + 1 if len(places) else 0

    def _read(self, documents: Sequence[Document], folder: Path | None) -> MediaWindow:
        text = self._begin + "".join(document.text.removeprefix(self._begin) + self._end for document in documents)
        inputs: dict[str, list[Any]] = {kind: [] for kind in MEDIA_KINDS}
        num_pixels = 0
        for document in documents:
            for one in document.media:
                with at_row(document.place):
                    inputs[one.kind].append(opened := self._opened(one, folder))
                    num_pixels += opened.width * opened.height if one.kind == "image" else 0
                    if num_pixels > MAX_PIXELS_AT_ONCE:
                        raise bad_media(
                            f"images of more than {MAX_PIXELS_AT_ONCE >> 20} million pixels in total",
                            "Use smaller images, or fewer per row.",
                        )
        with at_row(documents[-1].place):
            return self._process(text, inputs["image"], inputs["audio"])

    def _opened(self, reference: Reference, folder: Path | None) -> Any:
        data = content_of(reference, folder)
        return image_of(data) if reference.kind == "image" else samples_of(data, self._rate)

    @property
    def _rate(self) -> int:
        """The number of samples of sound a second."""
        if not hasattr(self._processor, "feature_extractor"):
            raise bad_media("sound, which this model does not support", "Use text or image data.")
        rate: int = self._processor.feature_extractor.sampling_rate
        return rate

    def _process(self, text: str, images: list[Any], sounds: list[Any]) -> MediaWindow:
        named: dict[str, Any] = {"images": [images]} if images else {}
        if sounds:
            named |= {"audio": sounds, "sampling_rate": self._rate}
        with processing():
            read = dict(self._processor(text=[text], return_tensors="pt", add_special_tokens=False, **named))
            ids_T = read.pop("input_ids")[0]
            read.pop("attention_mask", None)  # nothing is padded
            media = in_dtype(read, self._dtype)
        if named and not is_one_of(self.placeholders, ids_T).any():
            raise bad_media("images or sound, but config.json defines no placeholder token for them", "Use text data.")
        return MediaWindow(ids_T, media)


def text_or_media(part: TextPart, hears: Callable[[], bool], text: Callable[[], R], media: Callable[[], R] | None) -> R:
    """Return ``text()``, or ``media()`` for a source with images or sound, which are refused without ``media``.

    ``hears``: see ``has_sound``.
    """
    if media is None:
        return text()
    if has_sound(part, hears):
        return media()
    try:
        return text()
    except MediaFound:
        return media()


def is_one_of(tokens: Collection[int], ids: torch.Tensor) -> torch.Tensor:
    """Return a mask of the ``ids`` that are among the ``tokens``."""
    return torch.isin(ids, torch.tensor(sorted(tokens), dtype=ids.dtype))


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


def in_dtype(media: Media, dtype: torch.dtype) -> Media:
    """Return ``media`` with floats of ``dtype``, as the model computes with them."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in media.items()}


@contextmanager
def processing() -> Iterator[None]:
    """Raise CalibrationError if the processor's own code fails inside, on data of anybody."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        raise CalibrationError(
            f"the model's processor cannot read it: {reason_of(error)}",
            code="bad_media",
            hint="Check that this model supports images or sound of this type and number.",
            field="/calibration/source",
        ) from error


def load_processor(folder: Path, auto_class: Any) -> Any:
    """Load a processor from the folder of its model with a class such as ``AutoProcessor``. Raises ModelError."""
    try:
        with tokenizer_files(folder) as files:
            processor = auto_class.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=False)
        for name in ("processor_config.json", "preprocessor_config.json"):
            check_left_out(type(processor), name, files.left_out.get(name, ()))
        return processor
    except QuantError:
        raise
    except BaseException as error:  # as for tokenizers
        if not is_failure(error):
            raise
        raise ModelError(
            f"The model's image and audio processor cannot be loaded: {reason_of(error)}",
            code="no_processor",
            hint="Put its files (processor_config.json, preprocessor_config.json) next to the weights, and install "
            "its dependencies: Pillow, and the torchvision for your torch version. Or calibrate with text.",
        ) from error
