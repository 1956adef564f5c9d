"""The routes of projects. A key sees its own; with the scope ``operator`` it sees, makes and changes all of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from sqlalchemy.orm import Session

from api.http.deps import SessionsDep
from api.http.errors import Problem, may
from api.http.security import OPERATOR, Operator, Reader
from api.http.strict_json import StrictJsonRoute
from api.projects.schemas import ProjectCreate, ProjectList, ProjectOut, ProjectPatch
from api.store.accounts import audit, projects
from api.store.ids import new_id
from api.store.tables.jobs import Project

router = APIRouter(prefix="/projects", tags=["projects"], route_class=StrictJsonRoute)

ProjectId = Annotated[str, Path(pattern="^prj_[0-9a-f]{32}$")]


@router.get("")
def list_projects(caller: Reader, sessions: SessionsDep) -> ProjectList:
    """List the project of the key; all projects with the scope ``operator``."""
    with sessions.begin() as session:
        all_projects = projects.find_all(session)
        return ProjectList(
            data=[
                _show(session, project)
                for project in all_projects
                if OPERATOR in caller.scopes or project.id == caller.project_id
            ]
        )


@router.post("", status_code=201, responses=may(409, 422))
def create_project(body: ProjectCreate, caller: Operator, sessions: SessionsDep, response: Response) -> ProjectOut:
    """Create a project without keys: make its first one with ``POST /v1/keys`` and ``project_id``."""
    with sessions.begin() as session:
        _check_name(session, body.name)
        project = Project(id=new_id("prj"), **body.model_dump())
        session.add(project)
        session.flush()
        audit.note(session, caller, "project.create", project.id, project_id=project.id, **body.model_dump())
        response.headers["Location"] = f"/v1/projects/{project.id}"
        return _show(session, project)


@router.get("/{project_id}", responses=may(404))
def get_project(project_id: ProjectId, caller: Reader, sessions: SessionsDep) -> ProjectOut:
    """Return a project: its quotas, and how much of them it uses."""
    if OPERATOR not in caller.scopes and project_id != caller.project_id:
        raise no_such_project()
    with sessions.begin() as session:
        return _show(session, open_project(session, project_id))


@router.patch("/{project_id}", responses=may(404, 409, 422))
def edit_project(project_id: ProjectId, body: ProjectPatch, caller: Operator, sessions: SessionsDep) -> ProjectOut:
    """Change the name or the quotas. Nothing that exists is taken away; new objects must fit."""
    changes = body.model_dump(exclude_unset=True)
    with sessions.begin() as session:
        project = open_project(session, project_id)
        if changes.get("name", project.name) != project.name:
            _check_name(session, body.name)
        for name, value in changes.items():
            setattr(project, name, value)
        session.flush()
        audit.note(session, caller, "project.edit", project_id, project_id=project_id, **changes)
        return _show(session, project)


def open_project(session: Session, project_id: str) -> Project:
    """Return the project. Raises Problem 404."""
    project = projects.find(session, project_id)
    if project is None:
        raise no_such_project()
    return project


def no_such_project() -> Problem:
    return Problem(404, "project_not_found", "There is no such project.")


def _check_name(session: Session, name: str) -> None:
    if projects.find_by_name(session, name):
        entry = {"pointer": "#/name", "detail": "another project has this name", "code": "name_taken"}
        raise Problem(409, "name_taken", f"A project '{name}' already exists.", errors=[entry])


def _show(session: Session, project: Project) -> ProjectOut:
    return ProjectOut.of(project, projects.measure(session, project.id))
