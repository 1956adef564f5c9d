"""The recipe docs/extending/endpoint.md: its route runs in the service, and its own tests pass there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from api.http.security import authenticate
from tests.support.packages import files_of, write_files


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # pydantic looks names up there
    spec.loader.exec_module(module)
    return module


def test_the_route_of_the_recipe(client: TestClient, tmp_path: Path) -> None:
    folder = write_files(tmp_path, files_of("endpoint"))
    router = load(folder / "api" / "algorithms" / "endpoints.py").router
    app = client.app
    assert isinstance(app, FastAPI)
    num_routes = len(app.router.routes)
    app.include_router(router, prefix="/v1", dependencies=[Depends(authenticate)])
    app.router.routes.insert(0, app.router.routes.pop(num_routes))  # in front of the dashboard's, which takes any path
    tests = load(folder / "tests" / "integration" / "test_api_algorithms.py")
    names = [name for name in vars(tests) if name.startswith("test_")]
    assert len(names) == 2
    for name in names:
        getattr(tests, name)(client)
