"""The audit log: one row for every change that somebody asked for, in the transaction that makes the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.store.tables.accounts import AuditEntry


@dataclass(frozen=True)
class Shown:
    """The credentials of a request: the hash of the key's secret, and that of the cookie if it came with one."""

    key_id: str
    secret_sha256: bytes
    sign_in_sha256: bytes | None = None


@dataclass(frozen=True)
class Caller:
    """The sender of a request: a key of a project. ``key_id`` None is the operator on the machine itself."""

    project_id: str
    key_id: str | None
    scopes: frozenset[str]
    request_id: str | None = None
    shown: Shown | None = None


@dataclass(frozen=True)
class AuditFilter:
    """A filter for entries of the audit log; a field that is None matches everything."""

    project_id: str | None = None
    action: str | None = None
    object_id: str | None = None


def note(
    session: Session, caller: Caller, action: str, object_id: str, *, project_id: str | None = None, **detail: Any
) -> None:
    """Note that ``caller`` does ``action`` to ``object_id``, of his project unless ``project_id`` names another."""
    session.add(
        AuditEntry(
            project_id=project_id or caller.project_id,
            key_id=caller.key_id,
            action=action,
            object_id=object_id,
            request_id=caller.request_id,
            detail=detail,
        )
    )


def page(session: Session, wanted: AuditFilter, *, before: int | None, limit: int) -> Sequence[AuditEntry]:
    """Return the entries with an id below ``before``, newest first."""
    entries = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
    for column, value in (
        (AuditEntry.project_id, wanted.project_id),
        (AuditEntry.action, wanted.action),
        (AuditEntry.object_id, wanted.object_id),
    ):
        if value is not None:
            entries = entries.where(column == value)
    if before is not None:
        entries = entries.where(AuditEntry.id < before)
    return session.scalars(entries).all()


def create_trigger_sql() -> str:
    """Return SQL that makes the table append-only for everybody who may not drop its trigger."""
    return """
CREATE OR REPLACE FUNCTION guard_audit_entry() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the audit log is only added to' USING ERRCODE = 'check_violation';
END $$;
CREATE OR REPLACE TRIGGER guard_audit_entry BEFORE UPDATE OR DELETE ON audit_entry
  FOR EACH ROW EXECUTE FUNCTION guard_audit_entry();
"""


def drop_trigger_sql() -> str:
    """Return SQL that undoes ``create_trigger_sql``."""
    return "DROP TRIGGER IF EXISTS guard_audit_entry ON audit_entry; DROP FUNCTION IF EXISTS guard_audit_entry();"
