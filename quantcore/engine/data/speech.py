"""Cuts transcripts with their sound into windows, as the encoder and decoder of a speech model read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from quantcore.data.documents import Document, at_row
from quantcore.engine.data.chat_template import chat_renderer
from quantcore.engine.data.media import MediaWindow, in_dtype, load_processor, processing
from quantcore.engine.data.media_files import content_of, samples_of


class SpeechReader:
    """Reads rows of text and sound as the model in ``folder`` does; its floats have ``dtype``.

    The tokens are what its decoder predicts: those that begin a transcript, without the first, and the text. The other
    members are those of ``MediaReader``.
    """

    placeholders: frozenset[int] = frozenset()

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        tokenize: Callable[[str], list[int]],
        dtype: torch.dtype,
    ) -> None:
        from transformers import AutoFeatureExtractor

        self._features = load_processor(folder, AutoFeatureExtractor)
        self.render = chat_renderer(tokenizer, {})
        self._tokenize = tokenize
        self._dtype = dtype
        around: list[int] = tokenizer("", add_special_tokens=True)["input_ids"]
        start, end = config.get("decoder_start_token_id"), tokenizer.eos_token_id
        self._before = [token for token in around if token not in (start, end)]
        self._num_left_out = 0

    @property
    def left_out(self) -> str:
        """A sentence about rows that were skipped; empty if none were."""
        if not self._num_left_out:
            return ""
        return (
            f"{self._num_left_out} rows were skipped, because the text for one audio input of the model does not "
            "fill a window. A smaller seq_len uses more of them."
        )

    def windows(self, documents: Iterable[Document], num: int, length: int, folder: Path | None) -> list[MediaWindow]:
        """Cut up to ``num`` windows of ``length`` tokens, each with the sound of one or more documents.

        Documents that do not fill a window with as much sound as the encoder hears at once are left out.
        """
        windows: list[MediaWindow] = []
        chosen: list[tuple[list[int], np.ndarray[Any, Any]]] = []
        for document in documents:
            if len(windows) == num:
                break
            with at_row(document.place):
                sounds = [samples_of(content_of(one, folder), self._features.sampling_rate) for one in document.media]
            chosen.append((self._tokenize(document.text), np.concatenate(sounds or [np.zeros(0, np.float32)])))
            while sum(len(samples) for _, samples in chosen) > getattr(self._features, "n_samples", np.inf):
                chosen.pop(0)
                self._num_left_out += 1
            ids = [*self._before, *(token for tokens, _ in chosen for token in tokens)]
            if len(ids) >= length:
                with at_row(document.place):
                    windows.append(self._heard(ids[:length], np.concatenate([samples for _, samples in chosen])))
                chosen = []
        return windows

    def _heard(self, ids: list[int], samples: np.ndarray[Any, Any]) -> MediaWindow:
        with processing():
            found = self._features(samples, sampling_rate=self._features.sampling_rate, return_tensors="pt")
            name = self._features.model_input_names[0]
            return MediaWindow(torch.tensor(ids), in_dtype({name: found[name]}, self._dtype))
