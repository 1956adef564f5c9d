"""The routes of presets and plans."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from api.deps import ContextDep
from api.jobs import service
from api.jobs.schemas import PlanCreate
from api.security import Reader
from api.strict_json import StrictJsonRoute
from quantcore.presets import PRESETS

router = APIRouter(tags=["catalog"], route_class=StrictJsonRoute)


class PresetOut(BaseModel):
    """A named scheme and the config that it stands for."""

    name: str
    title: str
    aliases: list[str]
    needs_calibration: bool
    config: dict[str, Any]


class PresetList(BaseModel):
    """All presets."""

    data: list[PresetOut]


@router.get("/presets")
def list_presets(_: Reader) -> PresetList:
    """The named schemes."""
    return PresetList(
        data=[
            PresetOut(
                name=preset.name,
                title=preset.title,
                aliases=list(preset.aliases),
                needs_calibration=preset.needs_calibration,
                config=preset.config.model_dump(mode="json"),
            )
            for preset in PRESETS.values()
        ]
    )


@router.post("/plans")
def make_plan(body: PlanCreate, _: Reader, context: ContextDep) -> dict[str, Any]:
    """What a job would do with this model: a decision per layer, sizes, memory. No side effect."""
    planned = service.make_plan(body, context.settings)
    return planned.plan.to_dict() | {"config": planned.config.model_dump(mode="json"), "preset": planned.preset}
