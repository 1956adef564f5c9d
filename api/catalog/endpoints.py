"""The routes of presets, model inspection and plans."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api.catalog import folders
from api.http.deps import ContextDep
from api.http.errors import may
from api.http.security import Reader
from api.http.strict_json import StrictJsonRoute
from api.jobs import models, service
from api.jobs.schema_of import SchemaOf
from api.jobs.schemas import ModelRef, PlanCreate
from api.jobs.stored_types import PlanOut
from quantcore.config.quantization import json_schema
from quantcore.config.recipes import Effort
from quantcore.plan.catalog import describe

router = APIRouter(tags=["catalog"], route_class=StrictJsonRoute)


class PresetOut(BaseModel):
    """A named scheme, the config that it stands for, the algorithms of each effort, and the formats that can hold it.

    ``needs_calibration``: whether the scheme alone does, without algorithms.
    """

    name: str
    title: str
    aliases: list[str]
    needs_calibration: bool
    recipes: dict[Effort, list[dict[str, Any]]]
    exports: list[str]
    config: dict[str, Any]


class PresetList(BaseModel):
    """All presets."""

    data: list[PresetOut]


@router.get("/presets")
def list_presets(_: Reader, context: ContextDep) -> PresetList:
    """List the named schemes."""
    return PresetList(
        data=[
            PresetOut.model_validate(describe(preset))
            for preset in service.known_presets(context.settings.presets_file).values()
        ]
    )


class LinearLayersOut(BaseModel):
    """A group of ``count`` linear layers with this name and shape [out, in]."""

    name: str
    shape: list[int]
    count: int


class EstimateOut(BaseModel):
    """The effect of a preset on the model: format -> size in bytes; ``refused`` says why the preset cannot be used."""

    preset: str
    size_bytes: dict[str, int]
    peak_memory_bytes: int | None
    refused: dict[str, str] | None = None


class GridOut(BaseModel):
    """Levels of weights that were already quantized. ``scope``: what shares a scale; ``share``: of sampled weights."""

    title: str
    name: str
    bits: int
    scope: Literal["group", "block", "row", "tensor"]
    group_size: int | None
    share: float


class InspectionOut(BaseModel):
    """The properties of a model. ``model`` names it as a job would store it: a real path, or an id with its commit.

    ``grids``: levels on which its weights lie already, since they were quantized before; from a few rows of them.
    """

    model: dict[str, Any]
    model_type: str
    architectures: list[str]
    num_blocks: int
    num_parameters: int
    dtypes: dict[str, int]
    linear_layers: list[LinearLayersOut]
    tied_embeddings: bool
    experts: dict[str, int] | None
    max_position_embeddings: int | None
    vocab_size: int | None
    license: str | None
    num_files: int
    size_bytes: int
    quantization: dict[str, str | None] | None
    grids: list[GridOut]
    estimates: list[EstimateOut]
    warnings: list[str]


@router.get("/models/inspect", responses=may(422), dependencies=[models.TURN])
def inspect_model(model: Annotated[ModelRef, Query()], caller: Reader, context: ContextDep) -> InspectionOut:
    """Describe a model, and estimate common presets for it. Reads the headers, and a few rows of the weights."""
    reference, inspection = models.inspect(model, context, caller)
    return InspectionOut.model_validate({"model": reference, **inspection})


class FolderOut(BaseModel):
    """The folder of a model that a job can read, and the size of its weight files. ``is_result``: a job made it."""

    path: str
    size_bytes: int
    is_result: bool


class FolderList(BaseModel):
    """The models that were found. ``is_complete`` is false if not all folders were searched."""

    data: list[FolderOut]
    is_complete: bool


@router.get("/models/folders")
def find_model_folders(_: Reader, context: ContextDep) -> FolderList:
    """Find the models below the folders that jobs may read. A job can name others there by their path."""
    settings = context.settings
    found = folders.find_models(settings.model_roots, besides=settings.data_dir)
    return FolderList(
        data=[
            FolderOut(path=str(each.path), size_bytes=each.size_bytes, is_result=each.is_result)
            for each in found.models
        ],
        is_complete=found.is_complete,
    )


@router.get("/config-schema")
def get_config_schema(_: Reader) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a whole config."""
    return json_schema()


@router.post("/plans", dependencies=[models.TURN])
def make_plan(body: PlanCreate, caller: Reader, context: ContextDep) -> Annotated[dict[str, Any], SchemaOf(PlanOut)]:
    """Plan a job: a decision per layer, sizes, memory; with ``hardware`` also if the job fits there. No side effect."""
    return service.show(service.make_plan(body, context, caller, body.hardware), context, caller)
