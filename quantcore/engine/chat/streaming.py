"""Generates token by token: the reader of a stream decides when the next token is computed.

``generate`` of Transformers calls its streamer from within. It runs in a thread here, which stops in the streamer until
the next token is asked for, so that two models can take turns on one device and each can be timed.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from queue import SimpleQueue

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from quantcore.engine.evaluation.generation import generate


class _Stopped(Exception):
    """No further token is asked for."""


class _TurnTaker(BaseStreamer):
    """Hands over each new token, then waits until another one is asked for. The prompt comes first."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[bool] = SimpleQueue()
        self.given: SimpleQueue[int | BaseException | None] = SimpleQueue()
        self._is_prompt = True

    def wait(self) -> None:
        if not self.asked.get():
            raise _Stopped

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.given.put(int(value.item()))
        self.wait()

    def end(self) -> None:
        self.given.put(None)


def stream_tokens(model: PreTrainedModel, ids_T: list[int], settings: GenerationConfig) -> Generator[int]:
    """Yield the tokens that ``generate`` appends to a prompt, each computed when it is asked for."""
    turns = _TurnTaker()

    def work() -> None:
        try:
            turns.wait()
            with torch.inference_mode():
                generate(model, torch.tensor([ids_T]), settings, turns)
        except _Stopped:
            pass
        except BaseException as error:  # raised again in the thread that reads
            turns.given.put(error)

    thread = threading.Thread(target=work, name="generate", daemon=True)
    thread.start()
    try:
        while True:
            turns.asked.put(True)
            given = turns.given.get()
            if given is None:
                return
            if isinstance(given, BaseException):
                raise given
            yield given
    finally:
        turns.asked.put(False)
        thread.join()
