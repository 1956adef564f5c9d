"""A goal instead of a scheme: where the model will run, how large it may be, and how good it must be. No torch."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, get_args

from pydantic import Field, StrictInt, model_validator

from quantcore.config.quantization import parse_size
from quantcore.config.target_devices import device_of
from quantcore.config.values import Settings
from quantcore.errors import ConfigError

Runtime = Literal["vllm", "transformers", "llama_cpp", "onnx"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
Best = Literal["best"]
DEFAULT_RECOVERY = 0.98
"""The share that a *faithful* result keeps: its KL divergence is at most 0.02 (``report.verdict``)."""


class Goal(Settings):
    """Where the result will run, how large it may be and how good it must be.

    The job chooses each layer's scheme, the KV cache and the algorithms.

    ``device`` is a name (``h100``) or the memory of a GPU (``24GB``), on which the weights and the KV cache of
    ``context`` tokens must fit. ``max_size`` limits the weight files. ``min_recovery`` is the share of the probability
    per token that the result must keep of its original's: exp(-KL), the geometric mean over text that the original
    writes itself, at the unfavourable end of the 95 % interval; ``best`` asks for the best result that fits. No trial
    starts that would probably end after ``max_time_s`` seconds.
    """

    runtime: Runtime
    device: Annotated[str, Field(min_length=1, max_length=40, examples=["h100", "24GB", "cpu"])]
    max_size: str | StrictInt | None = Field(default=None, examples=["4GB"])
    min_recovery: Annotated[float, Field(strict=True)] | Best = Field(
        default=DEFAULT_RECOVERY, json_schema_extra={"exclusiveMinimum": 0, "exclusiveMaximum": 1}
    )
    context: Annotated[StrictInt, Field(ge=1, le=1 << 24)] = 8192
    max_time_s: Annotated[StrictInt, Field(ge=1)] | None = None

    @property
    def max_bytes(self) -> int | None:
        return parse_size(self.max_size, "max_size") if isinstance(self.max_size, str) else self.max_size

    @property
    def max_divergence(self) -> float | None:
        """The largest mean KL divergence that keeps ``min_recovery``, in nats per token; None for ``best``."""
        return None if self.min_recovery == "best" else -math.log(self.min_recovery)

    @model_validator(mode="after")
    def _make_sense(self) -> Goal:
        device_of(self.device)
        if self.min_recovery != "best" and not 0 < self.min_recovery < 1:
            raise _invalid(
                f"{self.min_recovery:g} is not a share between 0 and 1.", "min_recovery", "Use a value such as 0.98."
            )
        try:
            size = self.max_bytes
        except ConfigError as error:
            error.field = "/goal/max_size"
            raise
        if size is not None and size < 1:
            raise _invalid(
                f"A size of {size} bytes is too small for any model.", "max_size", "Use a value such as 4GB."
            )
        return self


def parse_recovery(text: str) -> float | Best:
    """Read a share written as ``99%`` or ``0.99``, or ``best``. Raises ConfigError ``invalid_goal``."""
    if text == "best":
        return "best"
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share < 1:
        raise _invalid(f"'{text[:40]}' is not a share between 0 and 1.", "min_recovery", "Use 99%, 0.99 or best.")
    return share


def parse_tokens(text: str) -> int:
    """Read a number of tokens written as ``32k`` (1k is 1024) or ``32768``. Raises ConfigError ``invalid_goal``."""
    match = re.fullmatch(r"(\d{1,8})(k?)", text.lower())
    if not match or not int(match[1]):
        raise _invalid(f"'{text[:40]}' is not a number of tokens.", "context", "Use a value such as 32k or 32768.")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_duration(text: str) -> int:
    """Read a time written as ``90s``, ``30min`` or ``2h``, in seconds. Raises ConfigError ``invalid_goal``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", text.lower())
    seconds = round(float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]) if match else 0
    if not seconds:
        raise _invalid(f"'{text[:40]}' is not a time.", "max_time_s", "Use a value such as 90s, 30min or 2h.")
    return seconds


def _invalid(message: str, field: str, hint: str) -> ConfigError:
    return ConfigError(message, code="invalid_goal", hint=hint, field=f"/goal/{field}")
