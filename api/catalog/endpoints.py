"""The routes of presets and plans."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from api.deps import ContextDep
from api.jobs import models, service
from api.jobs.schemas import PlanCreate
from api.security import Reader
from api.strict_json import StrictJsonRoute
from quantcore.config import json_schema
from quantcore.export import formats_for

router = APIRouter(tags=["catalog"], route_class=StrictJsonRoute)


class PresetOut(BaseModel):
    """A named scheme, the config that it stands for, and the formats that can hold it."""

    name: str
    title: str
    aliases: list[str]
    needs_calibration: bool
    exports: list[str]
    config: dict[str, Any]


class PresetList(BaseModel):
    """All presets."""

    data: list[PresetOut]


@router.get("/presets")
def list_presets(_: Reader, context: ContextDep) -> PresetList:
    """The named schemes."""
    return PresetList(
        data=[
            PresetOut(
                name=preset.name,
                title=preset.title,
                aliases=list(preset.aliases),
                needs_calibration=preset.needs_calibration,
                exports=formats_for(preset.config),
                config=preset.config.to_dict(),
            )
            for preset in service.known_presets(context.settings.presets_file).values()
        ]
    )


@router.get("/config-schema")
def config_schema(_: Reader) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a whole config."""
    return json_schema()


@router.post("/plans")
def make_plan(body: PlanCreate, caller: Reader, context: ContextDep) -> dict[str, Any]:
    """What a job would do with this model: a decision per layer, sizes, memory. No side effect."""
    return service.make_plan(body, context.settings, models.reader(context, caller)).to_dict()
