"""The types of JSON that the service passes on as the engine wrote it, for the OpenAPI document (``SchemaOf``)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from quantcore.report.values import KeptTensor


class ProgressOut(BaseModel):
    """Progress of the present phase: ``done`` of ``total`` units; ``eta_s`` is the rest of the phase in seconds.

    ``memory_bytes`` is the memory of the engine's process at that moment.
    """

    phase: str
    done: int
    total: int
    unit: str
    eta_s: float | None = None
    memory_bytes: int | None = None


class AllocationOut(BaseModel):
    """Where a scheduler runs the present attempt, or why it waits, in the scheduler's words. ``id`` is its own number.

    ``AWAY``: the scheduler does not answer.
    """

    launcher: str
    id: str
    state: str
    reason: str
    nodes: str


class FailureOut(BaseModel):
    """The error of a failed job: its reason, a remedy, and whether a retry can help.

    ``detail`` is for experts, such as the end of the log. ``rank`` is the process of several that failed, and ``block``
    its decoder block; null where that is not known.
    """

    code: str
    message: str
    hint: str = ""
    retryable: bool = False
    detail: str = ""
    rank: int | None = None
    block: int | None = None


class PlannedLayerOut(BaseModel):
    """A layer that will be quantized: its decoder block (null outside them), its weight's shape [out, in], its scheme.

    ``chosen_by`` names the entry of the config that chose the scheme.
    """

    name: str
    block: int | None
    shape: list[int]
    scheme: str
    chosen_by: str


class PlanOut(BaseModel):
    """The plan of a job, made from the model's headers. Sizes are in bytes.

    ``experts``: how a mixture that is calibrated routes, with the calibration tokens that each expert gets on average.
    ``mix``, ``goal``, ``publish`` and ``capacity`` are there if the request asked for them; ``capacity`` says whether
    the job fits the hardware and how long it takes. ``time_s``: the median seconds of the project's last jobs with the
    same model, algorithms, texts, formats and goal; null if there is none. Then ``rough_time_s`` is that of those with
    the same model and preset, if any. ``possible_chains``: the algorithms that the first candidate of a goal can have.
    """

    model_type: str
    num_blocks: int
    num_layers: int
    layers: list[PlannedLayerOut]
    kept: list[KeptTensor]
    exports: list[str]
    config: dict[str, Any]
    preset: str | None
    mix: dict[str, Any] | None = None
    goal: dict[str, Any] | None = None
    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    needs_calibration: bool
    experts: dict[str, int] | None = None
    executor: str
    size_before_bytes: int
    size_after_bytes: int
    peak_memory_bytes: int
    memory_bytes: dict[str, int]
    memory_by_phase: dict[str, dict[str, int]]
    warnings: list[str]
    time_s: float | None
    rough_time_s: float | None = None
    possible_chains: list[list[str]] | None = None
    publish: dict[str, Any] | None = None
    capacity: dict[str, Any] | None = None
