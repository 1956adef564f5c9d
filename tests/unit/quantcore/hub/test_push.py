"""Pushes to our stand-in of the Hub: what is committed, what is not sent twice, and every fault with its code."""

from itertools import pairwise
from pathlib import Path

import pytest

from quantcore.errors import QuantError
from quantcore.events import Event, Progress
from quantcore.hub.push import push
from quantcore.hub.push_task import MANIFEST
from tests.support.hub_server import TOKEN, HubServer, Repository
from tests.support.publishing import WEIGHTS, assert_is_there, make_task, silence, task_of

# huggingface_hub hands files to httpx2 in the older of its two ways
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def repository_of(hub: HubServer, branch: str = "main") -> tuple[Repository, dict[str, bytes]]:
    repository = hub.repositories["org/new"]
    return repository, repository.commits[repository.refs[branch]]


def test_one_commit_with_every_file(hub: HubServer, tmp_path: Path) -> None:
    task = make_task(tmp_path, private=True, commit_message="int4")
    said: list[Event] = []
    done = push(task, TOKEN, said.append)
    repository, files = repository_of(hub)
    assert repository.private
    assert [(commit.sha, commit.title) for commit in repository.history] == [(done.revision, "int4")]
    assert done.url == f"{hub.url}/org/new/commit/{done.revision}"
    assert_is_there(task, files)
    assert set(files) == {MANIFEST, ".gitattributes", *(file.path for file in task.files)}
    progress = [event for event in said if isinstance(event, Progress)]
    assert progress[0].done == 0 and progress[-1].done == progress[-1].total == done.num_bytes
    assert {(event.phase, event.unit) for event in progress} == {("publish", "byte")}
    assert all(earlier.done <= later.done for earlier, later in pairwise(progress))


def test_the_same_again_makes_no_commit(hub: HubServer, tmp_path: Path) -> None:
    done = push(make_task(tmp_path), TOKEN, silence)
    hub.requests.clear()
    again = push(make_task(tmp_path, publication_id="pub_2"), TOKEN, silence)
    assert (again.revision, again.is_new, again.num_bytes) == (done.revision, False, 0)
    assert not hub.asked("/commit/", "POST") and not hub.asked("/lfs/", "PUT")
    assert len(repository_of(hub)[0].history) == 1


def test_only_what_differs_is_sent_and_old_shards_go(hub: HubServer, tmp_path: Path) -> None:
    old = {f"model-{n}.safetensors": bytes([n]) * 100 for n in (1, 2, 3)} | {"config.json": b"{}"}
    push(task_of(tmp_path / "old", old), TOKEN, silence)
    repository, files = repository_of(hub)
    repository.commits[repository.refs["main"]] = files | {"NOTES.md": b"a person's"}
    new = task_of(tmp_path / "new", {"model-1.safetensors": b"\1" * 100, "config.json": b"{ }"})
    hub.requests.clear()
    push(new, TOKEN, silence)
    assert not hub.asked("/lfs/", "PUT")
    files = repository_of(hub)[1]
    assert set(files) == {".gitattributes", "NOTES.md", MANIFEST, "model-1.safetensors", "config.json"}
    assert_is_there(new, files)


def test_a_branch_a_folder_and_a_pull_request(hub: HubServer, tmp_path: Path) -> None:
    task = make_task(tmp_path, revision="int4", path_in_repo="sub/folder")
    push(task, TOKEN, silence)
    repository, files = repository_of(hub, "int4")
    assert_is_there(task, files, "sub/folder/")
    assert set(repository_of(hub)[1]) == {".gitattributes"}
    asked = push(make_task(tmp_path, create_pr=True), TOKEN, silence)
    assert asked.url == f"{hub.url}/org/new/discussions/1"
    assert repository.refs["refs/pr/1"] == asked.revision
    assert set(repository_of(hub)[1]) == {".gitattributes"}


def test_in_parts(hub: HubServer, tmp_path: Path) -> None:
    hub.part_bytes = 300_000
    task = make_task(tmp_path)
    push(task, TOKEN, silence)
    assert len(hub.asked("/cdn/lfs/", "PUT")) == 7
    assert_is_there(task, repository_of(hub)[1])


def test_someone_elses_commit_in_between(hub: HubServer, tmp_path: Path) -> None:
    """The branch moves between the look at it and the commit: looked at anew, nothing of theirs is lost."""
    hub.add("org/new", {"NOTES.md": b"1"})
    others = [b"2", b"3"]
    answer = hub.faults.wait

    def move(request: str, *, after: bool) -> None:
        if "/commit/" in request and not after and others:
            hub.add("org/new", repository_of(hub)[1] | {"NOTES.md": others.pop(0)})
        answer(request, after=after)

    hub.faults.wait = move  # type: ignore[method-assign]
    task = make_task(tmp_path)
    push(task, TOKEN, silence)
    repository, files = repository_of(hub)
    assert files["NOTES.md"] == b"3" and len(repository.history) == 1
    assert_is_there(task, files)
    others[:] = [b"4"] * 9
    with pytest.raises(QuantError) as caught:
        push(task_of(tmp_path / "b", {"config.json": b"other"}), TOKEN, silence)
    assert (caught.value.code, caught.value.retryable) == ("hub_conflict", True)


@pytest.mark.parametrize("create_pr", [False, True])
def test_a_commit_whose_answer_is_lost_is_found(hub: HubServer, tmp_path: Path, create_pr: bool) -> None:
    hub.faults.lost.append("/commit/")
    done = push(make_task(tmp_path, create_pr=create_pr), TOKEN, silence)
    repository, _ = repository_of(hub)
    assert [commit.sha for commit in repository.history] == [done.revision]
    assert len(hub.asked("/commit/", "POST")) == 1


@pytest.mark.parametrize("create_pr", [False, True])
def test_a_second_attempt_finds_the_first_ones_commit(hub: HubServer, tmp_path: Path, create_pr: bool) -> None:
    """Also when others have committed on top of it, over one of its files."""
    done = push(make_task(tmp_path, create_pr=create_pr), TOKEN, silence)
    repository, files = repository_of(hub)
    if not create_pr:
        sha = "f" * 40
        repository.commits[sha] = files | {"README.md": b"better"}
        repository.history.append(type(repository.history[0])(sha, done.revision, "Better", ""))
        repository.refs["main"] = sha
    again = push(make_task(tmp_path, attempt=2, create_pr=create_pr), TOKEN, silence)
    assert again.revision == done.revision
    assert len(hub.asked("/commit/", "POST")) == 1


def test_a_commit_that_holds_something_else_is_seen_and_mended(hub: HubServer, tmp_path: Path) -> None:
    wait = hub.faults.wait

    def spoil(request: str, *, after: bool) -> None:
        if "/commit/" in request and after:
            repository_of(hub)[1]["config.json"] = b"spoilt"
        wait(request, after=after)

    hub.faults.wait = spoil  # type: ignore[method-assign]
    with pytest.raises(QuantError) as caught:
        push(make_task(tmp_path), TOKEN, silence)
    assert (caught.value.code, caught.value.retryable) == ("hub_hash_mismatch", True)
    hub.faults.wait = wait  # type: ignore[method-assign]
    task = make_task(tmp_path, attempt=2)
    push(task, TOKEN, silence)
    assert_is_there(task, repository_of(hub)[1])


def test_cut_in_the_middle_of_a_file(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.cuts += [("PUT /cdn/lfs", 1_000_000), ("PUT /cdn/lfs", 500_000)]
    task = make_task(tmp_path)
    push(task, TOKEN, silence)
    assert not hub.faults.cuts
    assert_is_there(task, repository_of(hub)[1])


STORAGE = "Private repository storage limit reached, please upgrade your plan."
FAULTS = {
    "5xx": ([("/commit/", 503, "")], "hub_unreachable", True),
    "5xx, all the time, of a file": ([("PUT /cdn", 500, "")] * 9, "hub_unreachable", True),
    "5xx, all the time, before": ([("GET /api/models", 502, "")] * 9, "hub_unreachable", True),
    "429, again": ([("/commit/", 429, "")] * 2, "hub_rate_limited", True),
    "401": ([("GET /api/models", 401, "Invalid credentials in Authorization header")], "hub_auth", False),
    "403": ([("/preupload/", 403, "no rights")], "hub_forbidden", False),
    "403 of the commit": ([("/commit/", 403, "no rights")], "hub_forbidden", False),
    "full, of a batch": ([("lfs/objects/batch", 403, STORAGE)], "hub_storage_limit", False),
    "full, of a commit": ([("/commit/", 402, "")], "hub_storage_limit", False),
    "412, always": ([("/commit/", 412, "A commit has happened since.")] * 4, "hub_conflict", True),
    "400": ([("/commit/", 400, "bad name")], "hub_rejected", False),
    "404": ([("/preupload/", 404, "")], "hub_rejected", False),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_a_code_and_leaves_no_commit(hub: HubServer, tmp_path: Path, name: str) -> None:
    answers, code, retryable = FAULTS[name]
    hub.add("org/new", {"a": b"a"})
    hub.faults.answers += answers
    with pytest.raises(QuantError) as caught:
        push(make_task(tmp_path), TOKEN, silence)
    assert (caught.value.code, caught.value.retryable) == (code, retryable)
    assert TOKEN not in str(caught.value) and "Signature" not in str(caught.value)
    repository, _ = repository_of(hub)
    assert not repository.history
    hub.faults.answers.clear()
    task = make_task(tmp_path, attempt=2)
    push(task, TOKEN, silence)
    assert len(repository.history) == 1
    assert_is_there(task, repository_of(hub)[1])


def test_a_wait_that_the_hub_asks_for(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.answers += [("/repos/create", 429, ""), ("/commit/", 429, "")]
    push(make_task(tmp_path), TOKEN, silence)
    assert len(repository_of(hub)[0].history) == 1


def test_a_full_account_is_said_so_and_what_was_sent_stays(hub: HubServer, tmp_path: Path) -> None:
    hub.quota_bytes = len(WEIGHTS) + 10
    files = {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS[::-1]}
    with pytest.raises(QuantError) as caught:
        push(task_of(tmp_path, files), TOKEN, silence)
    assert caught.value.code == "hub_storage_limit"
    hub.quota_bytes = None
    hub.requests.clear()
    push(task_of(tmp_path, files, attempt=2), TOKEN, silence)
    assert len(hub.asked("/cdn/lfs", "PUT")) == 1


def test_whose_repository_it_is(hub: HubServer, tmp_path: Path) -> None:
    for token, repo_id, code in (
        (TOKEN, "others/new", "hub_not_found"), ("hf_wrongWrongWrong", "org/new", "hub_auth"),
    ):  # fmt: skip
        with pytest.raises(QuantError) as caught:
            push(make_task(tmp_path, repo_id=repo_id), token, silence)
        assert caught.value.code in (code, "hub_forbidden"), caught.value
    assert hub.repositories == {}


def test_a_damaged_artifact_does_not_leave_the_house(hub: HubServer, tmp_path: Path) -> None:
    task = make_task(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": 2}')
    with pytest.raises(QuantError) as caught:
        push(task, TOKEN, silence)
    assert caught.value.code == "artifact_corrupt"
    task = make_task(tmp_path)
    (tmp_path / MANIFEST).write_text('{"format": 1, "files": []}')
    with pytest.raises(QuantError, match="does not list"):
        push(task, TOKEN, silence)
    assert hub.requests == []


def test_a_model_card_that_the_hub_refuses(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(QuantError) as caught:
        push(task_of(tmp_path, {"README.md": b"---\nBROKEN: [\n---\n"}), TOKEN, silence)
    assert caught.value.code == "hub_rejected"
    assert not repository_of(hub)[0].history
