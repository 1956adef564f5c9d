"""Rights: nobody grants what they do not hold, overwrites what is another project's, or restores what is not signed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from fastapi import Response
from fastapi.testclient import TestClient
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from api.http.errors import Problem
from api.http.security import ADMIN, CHAT, OPERATOR, READ, ROLES, WRITE, create_key, new_key
from api.keys import endpoints as key_routes
from api.keys.schemas import KeyCreate
from api.main import create_app
from api.members import endpoints as member_routes
from api.members.schemas import MemberCreate, MemberPatch
from api.settings import Settings
from api.store.accounts import keys, projects
from api.store.accounts.audit import Caller
from api.store.engine import Sessions
from api.store.ids import new_id
from api.store.tables.jobs import ApiKey, Job, Member, Project
from api.store.vault import Vault
from bitfoundry.errors import StackError
from bitfoundry.local import backup
from tests.support.service import WorkerProcess
from tests.support.waiting import wait_until

MAX_CALLS = 3
SLOW = pytest.param((READ, ADMIN, OPERATOR), marks=pytest.mark.slow)
Call = Callable[[Caller, Sessions], Any]
Names = tuple[str, ...]


@pytest.fixture
def rolled_back(postgres_url: str, sessions: Sessions) -> Iterator[sessionmaker[Session]]:
    """Sessions in one transaction that is never committed: a commit ends a savepoint, which can be undone."""
    engine = create_engine(postgres_url)
    with engine.connect() as connection, connection.begin() as outer:
        yield sessionmaker(connection, expire_on_commit=False, join_transaction_mode="create_savepoint")
        outer.rollback()
    engine.dispose()


def add_key(session: Session, scopes: Names, member: Member | None = None, *, follows_role: bool = False) -> str:
    key, _ = new_key(projects.DEFAULT, "k", scopes, None, member, follows_role=follows_role)
    keys.add(session, key)
    return key.id


def add_member(session: Session, role: str) -> Member:
    member = Member(id=new_id("mem"), project_id=projects.DEFAULT, name=role, role=role)
    session.add(member)
    session.flush()
    return member


def all_calls(session: Session) -> Iterator[Call]:
    """Every call that gives a key, a scope or a role, with every argument that makes a difference."""
    present = session.query(Member).filter(Member.removed_at.is_(None)).all()
    for role in ROLES:
        yield lambda caller, made, role=role: member_routes.add_member(
            MemberCreate(name=new_id("mem"), role=role), caller, made, Response()
        )
        for member in present:
            yield lambda caller, made, role=role, who=member.id: member_routes.edit_member(
                who, MemberPatch(role=role), caller, made
            )
    wanted = [None, *([scope] for scope in (READ, WRITE, CHAT, ADMIN, OPERATOR))]
    for scopes in wanted:
        for who in (None, *(member.id for member in present)):
            body = KeyCreate(name="k", scopes=scopes, member_id=who)
            yield lambda caller, made, body=body: key_routes.create_key(body, caller, made, Response())
    for key in session.query(ApiKey).filter(ApiKey.revoked_at.is_(None)).all():
        yield lambda caller, made, which=key.id: key_routes.rotate_key(which, caller, made, Response())


def shown_key(answer: Any) -> frozenset[str]:
    """The key whose secret an answer shows, if it does."""
    first = getattr(answer, "first_key", answer)
    return frozenset({first.id}) if getattr(first, "key", None) else frozenset()


class Search:
    """Tries all sequences of calls with all keys held, and fails where a key has more than ``allowed``.

    Of two sequences that lead to the same members and keys it follows one.
    """

    def __init__(self, made: sessionmaker[Session], allowed: frozenset[str]) -> None:
        self._made, self._allowed = made, allowed
        self._seen: set[tuple[int, frozenset[Any]]] = set()
        self.num_calls = 0

    def run(self, held: frozenset[str], depth: int = 0) -> None:
        with self._made() as session:
            scopes = {key_id: key.scopes for key_id, key in keys.find_all_valid(session, held).items()}
            gained = frozenset().union(*scopes.values()) - self._allowed
            assert not gained, f"{depth} calls gave {sorted(gained)} to one who had {sorted(self._allowed)}"
            state = depth, state_of(session, held)
            calls = [] if depth == MAX_CALLS or state in self._seen else [*all_calls(session)]
            self._seen.add(state)
        callers = {own: key_id for key_id, own in scopes.items() if ADMIN in own}  # every one of these routes needs it
        for call in calls:
            for own, key_id in callers.items():
                self._try(call, Caller(projects.DEFAULT, key_id, own), held, depth)

    def _try(self, call: Call, caller: Caller, held: frozenset[str], depth: int) -> None:
        self.num_calls += 1
        undo = self._made.kw["bind"].begin_nested()
        try:
            answer = call(caller, self._made)
            self.run(held | shown_key(answer), depth + 1)
        except Problem:
            pass
        finally:
            undo.rollback()


def state_of(session: Session, held: frozenset[str]) -> frozenset[Any]:
    """The members with their roles and keys, without their names: as many times as there are such."""
    found: dict[str | None, list[Any]] = {member.id: [member.role] for member in session.query(Member)}
    for key in session.query(ApiKey):
        found.setdefault(key.member_id, []).append(f"{key.scopes} {key.follows_role} {key.id in held}")
    return frozenset(Counter(tuple(sorted(each)) for each in found.values()).items())


@pytest.mark.parametrize("scopes", [(ADMIN,), (READ, ADMIN), SLOW])
def test_no_three_calls_give_more_than_was_held(scopes: Names, rolled_back: sessionmaker[Session]) -> None:
    """The attacker has a key of an admin with named scopes; beside him there are a viewer and an admin with all."""
    with rolled_back.begin() as session:
        admin = add_member(session, "admin")
        add_key(session, ROLES["admin"], admin, follows_role=True)
        add_key(session, ROLES["viewer"], add_member(session, "viewer"), follows_role=True)
        own = add_key(session, scopes, None if OPERATOR in scopes else admin)
    search = Search(rolled_back, frozenset(scopes))
    search.run(frozenset({own}))
    assert search.num_calls > 300


def narrow_scopes() -> list[tuple[str, Names]]:
    """(role, scopes) of every key that a member of the role can have with named scopes."""
    return [
        (role, scopes)
        for role, whole in ROLES.items()
        for size in range(1, len(whole) + 1)
        for scopes in combinations(whole, size)
    ]


@pytest.mark.parametrize(("role", "scopes"), narrow_scopes())
def test_no_three_changes_of_role_widen_a_narrow_key(
    role: str, scopes: Names, rolled_back: sessionmaker[Session]
) -> None:
    """Whoever changes the role, and may: a key whose scopes were named never gains any."""
    with rolled_back.begin() as session:
        all_scopes = add_key(session, (READ, WRITE, CHAT, ADMIN))
        member = add_member(session, role)
        narrow = add_key(session, scopes, member)
    caller = Caller(projects.DEFAULT, all_scopes, frozenset(ROLES["admin"]))

    def change(num_left: int) -> None:
        with rolled_back() as session:
            assert keys.find_all_valid(session, [narrow])[narrow].scopes <= set(scopes)
        for later in ROLES if num_left else ():
            undo = rolled_back.kw["bind"].begin_nested()
            member_routes.edit_member(member.id, MemberPatch(role=later), caller, rolled_back)
            change(num_left - 1)
            undo.rollback()

    change(MAX_CALLS)


@pytest.mark.parametrize("other", ["", "/in/it", "/.."])
def test_a_folder_belongs_to_the_project_that_published_to_it(
    other: str, settings: Settings, sessions: Sessions, make_model: Callable[..., Path], tmp_path: Path,
    start_worker: Callable[..., WorkerProcess], wait_for: Callable[..., Job],
) -> None:  # fmt: skip
    """Of two projects that ask at once the second gets nothing, and later ones are told when they submit."""
    settings = settings.model_copy(update={"publish_urls": (f"file://{tmp_path}/out",)})
    to = f"file://{tmp_path}/out/team/model"
    with sessions.begin() as session:
        session.add(Project(id="prj_" + "b" * 32, name="b"))
    first, second = (
        {"Authorization": f"Bearer {create_key(sessions, 'k', project_id=project)}"}
        for project in (projects.DEFAULT, "prj_" + "b" * 32)
    )
    with TestClient(create_app(settings)) as client:

        def submit(headers: dict[str, str], url: str) -> Any:
            asked = {"model": {"path": str(make_model(new_id("m")))}, "config": {"preset": "fp8"}}
            return client.post("/v1/jobs", json=asked | {"publish": {"to": url}}, headers=headers)

        def publication(job: str, headers: dict[str, str]) -> Any:
            shown = client.get(f"/v1/jobs/{job}", headers=headers).json()["publication"]
            return shown if shown and shown["state"] in ("published", "failed") else None

        theirs = str(Path(f"/out/team/model{other}").resolve())
        one, two = submit(first, to).json()["id"], submit(second, f"file://{tmp_path}{theirs}").json()["id"]
        start_worker(settings)
        assert wait_until(lambda: publication(one, first))["state"] == "published"
        manifest = (tmp_path / "out/team/model/MANIFEST.json").read_bytes()
        refused = wait_until(lambda: publication(two, second))
        assert (refused["state"], refused["error"]["code"]) == ("failed", "target_taken")
        again = client.post(f"/v1/jobs/{two}/publish", headers=second)
        assert (again.status_code, again.json()["code"]) == (409, "target_taken")
        told = submit(second, f"file://{tmp_path}{theirs}")
        assert (told.status_code, told.json()["code"]) == (422, "target_taken"), told.text
        assert told.json()["errors"][0]["pointer"] == "#/publish/to"
    assert (tmp_path / "out/team/model/MANIFEST.json").read_bytes() == manifest


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def strangers_backup(path: Path, vault: Vault | None) -> Path:
    """A backup with a dump that would run a program, complete in itself, signed by ``vault``."""
    dump = b"COPY t FROM PROGRAM 'touch /tmp/pwned';"
    entry = {"path": "database.dump", "size": len(dump), "sha256": hashlib.sha256(dump).hexdigest()}
    manifest = json.dumps({"format": 1, "home": "/x", "files": [entry]}).encode()
    signed = {"MANIFEST.json.hmac": vault.sign(manifest).encode()} if vault else {}
    return archive(path, {"database.dump": dump, "MANIFEST.json": manifest} | signed)


def test_a_strangers_backup_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsigned, signed by another key, changed after it was signed; and where there is no key to look with."""
    monkeypatch.setattr(backup, "_load", lambda *_: pytest.fail("the dump was run"))
    ours, other = Vault(b"a" * 32), Vault(b"b" * 32)
    changed = strangers_backup(tmp_path / "changed", ours)
    changed.write_bytes(changed.read_bytes().replace(b'"/x"', b'"/y"'))
    cases = [
        (strangers_backup(tmp_path / "unsigned", None), ours, "nobody signed it"),
        (strangers_backup(tmp_path / "other", other), ours, "another secret key signed it"),
        (changed, ours, "or it was changed"),
        (strangers_backup(tmp_path / "own", ours), None, "there is no secret key on this machine"),
    ]
    for file, vault, why in cases:
        with pytest.raises(StackError, match=why) as refused:
            backup.restore(file, tmp_path / "home", print, vault=vault)
        assert "--trust" in refused.value.hint
    assert not (tmp_path / "home").exists()


def test_a_trusted_or_signed_backup_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "_load", lambda *_: None)
    own = Vault(b"a" * 32)
    backup.restore(strangers_backup(tmp_path / "own", own), tmp_path / "a", print, vault=own)
    backup.restore(strangers_backup(tmp_path / "none", None), tmp_path / "b", print, vault=None, trusted=True)
    assert (tmp_path / "a").is_dir() and (tmp_path / "b").is_dir()
