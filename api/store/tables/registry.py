"""The tables of the model registry: models, their versions, aliases, and the requests to move a protected alias."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from api.store.tables.jobs import NOW, Base

VERSION_KEY = ["registry_version.model_id", "registry_version.version"]


class RegisteredModel(Base):
    """A model of a project's registry. ``last_version``: the number that was given last; none is given twice."""

    __tablename__ = "registered_model"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    last_version: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (Index("uq_registered_model_name", "project_id", "name", unique=True),)


class RegistryVersion(Base):
    """A version of a model: the result of a job, which cannot be deleted as long as this row refers to it."""

    __tablename__ = "registry_version"

    model_id: Mapped[str] = mapped_column(ForeignKey("registered_model.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id"), index=True)
    key_id: Mapped[str | None]  # that added it
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (Index("uq_registry_version_job", "model_id", "job_id", unique=True),)


class RegistryAlias(Base):
    """A name that points to one version of a model."""

    __tablename__ = "registry_alias"

    model_id: Mapped[str] = mapped_column(ForeignKey("registered_model.id", ondelete="CASCADE"), primary_key=True)
    alias: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int]
    moved_at: Mapped[datetime] = mapped_column(server_default=NOW)

    __table_args__ = (ForeignKeyConstraint(["model_id", "version"], VERSION_KEY, name="fk_registry_alias_version"),)


class AliasRequest(Base):
    """A request to move a protected alias. ``to_version`` None: to remove it; ``from_version`` None: it is new."""

    __tablename__ = "alias_request"

    id: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[str] = mapped_column(ForeignKey("registered_model.id", ondelete="CASCADE"))
    alias: Mapped[str]
    from_version: Mapped[int | None]
    to_version: Mapped[int | None]
    reason: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="pending")
    asked_by: Mapped[str | None]  # a key
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    decided_by: Mapped[str | None]  # a key
    decided_at: Mapped[datetime | None]
    comment: Mapped[str | None]  # of the decision

    __table_args__ = (
        CheckConstraint("state IN ('approved', 'pending', 'refused', 'withdrawn')", name="state"),
        CheckConstraint("(state = 'pending') = (decided_at IS NULL)", name="decided"),
        Index("ix_alias_request_list", "model_id", text("id DESC")),
        Index("uq_alias_request_pending", "model_id", "alias", unique=True, postgresql_where=text("state = 'pending'")),
    )
