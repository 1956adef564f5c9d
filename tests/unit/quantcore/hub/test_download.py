"""The Hub as the engine uses it, against our stand-in (tests.support.hub_server says what that does not cover)."""

import json
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from quantcore.checkpoint.headers import ModelHeaders, read_local
from quantcore.checkpoint.side_files import module_files
from quantcore.cli import main as cli
from quantcore.cli import running
from quantcore.config.task import Task
from quantcore.errors import ModelError
from quantcore.events import Event, PhaseStarted, Progress
from quantcore.hub import download as hub
from quantcore.hub import outline
from quantcore.hub.names import is_model_id
from tests.support.hub_server import TOKEN, HubServer

CONFIG = json.dumps({"model_type": "llama", "num_hidden_layers": 1}).encode()
INDEX = "model.safetensors.index.json"


def safetensors(*names: str, size: int = 64) -> bytes:
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [size * at, size * (at + 1)]}
        for at, name in enumerate(names)
    }
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(range(256))[:size] * len(names)


def zeros(size: int) -> bytes:
    """A file of one large tensor."""
    encoded = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(size)


def index(**names: str) -> bytes:
    return json.dumps({"weight_map": names}).encode()


MODEL = {
    "config.json": CONFIG,
    "model.safetensors": safetensors("a", "b"),
    "tokenizer.json": b"{}",
    "LICENSE": b"free",
    "README.md": b"# hello",
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server
        huggingface_hub.close_session()  # type: ignore[attr-defined]


def fails(model_id: str = "org/tiny", revision: str = "main") -> ModelError:
    with pytest.raises(ModelError) as error:
        hub.read_headers(model_id, revision)
    return error.value


def fails_download(sha: str, model_id: str = "org/tiny") -> ModelError:
    with pytest.raises(ModelError) as error:
        hub.download(model_id, sha, lambda event: None)
    return error.value


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_headers_are_those_of_the_downloaded_model(server: HubServer) -> None:
    sha = server.add("org/tiny", MODEL)
    headers, resolved = hub.read_headers("org/tiny")
    assert resolved == sha
    asked = server.asked("/resolve/")
    assert asked and all(f"/resolve/{sha}/" in request.path for request in asked)  # the branch may move meanwhile
    assert set(headers.tensors) == {"a", "b"}
    assert headers == read_local(hub.download("org/tiny", sha, lambda event: None))


def test_headers_are_read_without_the_weights(server: HubServer) -> None:
    server.add("org/tiny", MODEL | {"model.safetensors": zeros(30_000_000)})
    headers, _ = hub.read_headers("org/tiny")
    assert headers.total_bytes == 30_000_000
    (request,) = server.asked("/cdn/")
    assert request.headers["range"] == f"bytes=0-{outline.FIRST_BYTES - 1}"
    assert server.asked("/tokenizer.json") == []


def test_small_tensors_that_a_plan_needs_are_filled_in(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by a request of its own, or with its neighbours; the rest are holes."""
    server.add("org/tiny", MODEL | {"model.safetensors": safetensors("a.g_idx", "b", "c.g_idx", "d.g_idx")})
    needed, seen = re.compile(r"\.g_idx$"), []

    def read(folder: Path) -> ModelHeaders:
        headers = read_local(folder)
        data = (folder / "model.safetensors").read_bytes()
        seen.append({name: data[one.begin : one.end] == bytes(range(64)) for name, one in headers.tensors.items()})
        return headers

    monkeypatch.setattr(outline, "LARGEST_GAP", 10)
    assert set(hub.read_headers("org/tiny", read=read, needed=needed)[0].tensors) == {
        "a.g_idx", "b", "c.g_idx", "d.g_idx"
    }  # fmt: skip
    assert seen == [{"a.g_idx": True, "b": False, "c.g_idx": True, "d.g_idx": True}]
    assert len(server.asked("/cdn/")) == 3
    monkeypatch.setattr(outline, "MAX_SPANS", 1)
    with pytest.raises(ModelError, match="0 MiB in 2 pieces") as error:
        hub.read_headers("org/tiny", read=read, needed=needed)
    assert error.value.code == "header_too_large" and "Download it" in error.value.hint


def test_a_long_header_is_asked_for_again(server: HubServer) -> None:
    names = [f"model.layers.{at}.weight" for at in range(3000)]
    server.add("org/tiny", MODEL | {"model.safetensors": safetensors(*names, size=1)})
    headers, _ = hub.read_headers("org/tiny")
    assert len(headers.tensors) == 3000
    assert len(server.asked("/cdn/")) == 2


def test_a_revision_is_a_commit_from_then_on(server: HubServer) -> None:
    old = server.add("org/tiny", MODEL)
    tag = server.add("org/tiny", MODEL | {"model.safetensors": safetensors("tagged")}, branch="refs/pr/1")
    new = server.add("org/tiny", MODEL | {"model.safetensors": safetensors("new")})
    for revision, sha in (("main", new), ("refs/pr/1", tag), (old, old)):
        assert hub.resolve("org/tiny", revision) == sha
        assert hub.read_headers("org/tiny", revision)[1] == sha
    assert set(read_local(hub.download("org/tiny", old, lambda event: None)).tensors) == {"a", "b"}


def test_the_index_of_a_mixture_of_experts(server: HubServer) -> None:
    names = [f"model.layers.{at % 61}.mlp.experts.{at}.gate_up_projection.weight" for at in range(52_000)]
    shard = {"m-1.safetensors": safetensors(*names, size=0), "unused.safetensors": b"x"}
    server.add("org/tiny", {"config.json": CONFIG, **shard, INDEX: index(**dict.fromkeys(names, "m-1.safetensors"))})
    assert len(hub.read_headers("org/tiny")[0].tensors) == 52_000
    assert server.asked("unused") == []


BAD_IDS = ("../x", "/etc", "a/b/c", "file://x", "file:///etc/passwd", "tiny", "a/..", "a/b--c", "a/b\n", "a/.b", "",
    "a/b.git", "a%2f/b", "http://h/x", "a/" + "b" * 300, "-a/b", "a\\b/c", "a/b?x=1", "a/b#c", "a@h/b",
)  # fmt: skip


@pytest.mark.parametrize("model_id", BAD_IDS)
def test_a_bad_id_never_leaves_the_house(server: HubServer, model_id: str) -> None:
    assert fails(model_id).code == "invalid_model_id"
    assert fails_download("0" * 40, model_id).code == "invalid_model_id"
    assert server.requests == []


def test_good_ids() -> None:
    for model_id in ("org/name", "HuggingFaceTB/SmolLM2-135M", "a/b", "_x/Qwen2.5_0.5B", "01-ai/Yi-1.5-6B"):
        assert is_model_id(model_id), model_id


def test_what_is_not_there(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("org/tiny", MODEL)
    server.add("org/hidden", MODEL, private=True)
    assert fails("org/none").code == "hub_not_found"
    assert fails("org/hidden").code == "hub_not_found"
    assert fails(revision="v9").code == "hub_revision_not_found"
    assert fails_download("0" * 40).code == "hub_revision_not_found"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fails("org/none").code == "hub_not_found"
    hub.read_headers("org/hidden")


def test_a_gated_model(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sha = server.add("org/tiny", MODEL, gated=True)
    for token in (None, TOKEN):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        error = fails()
        assert (error.code, error.retryable) == ("hub_gated", False)
        assert "terms" in error.hint
        assert fails_download(sha).code == "hub_gated"


def test_a_token_is_for_the_hub_alone(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sha = server.add("org/tiny", MODEL, private=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.read_headers("org/tiny")
    hub.download("org/tiny", sha, lambda event: None)
    assert server.asked("/cdn/")  # refuses requests with a token
    monkeypatch.setenv("HF_TOKEN", "hf_wrongWrongWrongWrong")
    error = fails()
    assert error.code == "hub_auth"
    assert "hf_wrong" not in str(error)


@pytest.mark.parametrize(
    ("status", "code"),
    [(429, "hub_rate_limited"), (500, "hub_unreachable"), (503, "hub_unreachable"), (403, "hub_auth")],
)
def test_a_hub_that_refuses(server: HubServer, status: int, code: str) -> None:
    server.add("org/tiny", MODEL)
    server.status = status
    error = fails()
    assert (error.code, error.retryable) == (code, status != 403)
    if status == 429:
        assert "1 s" in error.hint


def test_no_hub_at_all(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    error = fails()
    assert (error.code, error.retryable) == ("hub_unreachable", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in str(fails())


def test_a_path_that_is_misspelled_looks_like_a_name_of_the_hub(server: HubServer) -> None:
    """``models/SmolLM`` beside ``models/SmolLM2-135M-Instruct`` was answered with the Hub alone."""
    assert "or the path" in (fails(model_id="models/SmolLM").hint or "")


def test_an_answer_that_is_none_of_a_hub(server: HubServer) -> None:
    sha = server.add("org/tiny", MODEL)
    repository = server.repositories["org/tiny"]
    repository.commits["../../etc"] = repository.commits.pop(sha)
    repository.refs["main"] = "../../etc"
    assert fails().code == "hub_unreachable"


def test_a_download_holds_what_is_needed_and_nothing_that_runs(server: HubServer) -> None:
    unwanted = dict.fromkeys(("pytorch_model.bin", "tokenizer.pkl", "modeling_x.py", "x.pt"), b"payload")
    unwanted |= {"original/model.safetensors": b"x", "consolidated.safetensors": b"x" * 1000, "tokenizer.bin": b"x"}
    weights = {"m-1.safetensors": safetensors("a"), "m-2.safetensors": safetensors("b")}
    shards = weights | {
        INDEX: index(a="m-1.safetensors", b="m-2.safetensors"),
        "model.safetensors": b"not in the index",
    }
    side = {"chat_template.jinja": b"{{ x }}", "generation_config.json": b"{}", "tokenizer[1].json": b"{}"}
    sha = server.add("org/tiny", MODEL | shards | side | unwanted)
    folder = hub.download("org/tiny", sha, lambda event: None)
    assert names_in(folder) == {"config.json", "tokenizer.json", "LICENSE", "README.md", INDEX, *weights, *side}
    cache = folder.parents[2]
    assert not [path for path in cache.rglob("*") if path.is_file() and path.read_bytes() == b"payload"]
    assert folder.name == sha


def test_progress_ends_with_all_bytes(server: HubServer) -> None:
    sha = server.add("org/tiny", MODEL)
    total = sum(map(len, MODEL.values()))
    task = Task.model_validate({"model_id": "org/tiny", "revision": sha, "output_dir": "/o", "config": int8()})
    for _ in range(2):  # the second time all is in the cache
        events: list[Event] = []
        fetched = hub.fetch(task, events.append)
        assert events[0] == PhaseStarted("download")
        progress = [event for event in events if isinstance(event, Progress)]
        assert (progress[-1].done, progress[-1].total, progress[-1].unit) == (total, total, "byte")
        assert [event.done for event in progress] == sorted(event.done for event in progress)
        assert fetched.model_folder.name == sha
        assert (fetched.model_id, fetched.revision) == ("org/tiny", sha)
    assert len(server.asked("/cdn/")) == 1
    assert hub.fetch(fetched, events.append) is fetched


def test_a_dropped_connection_is_taken_up_where_it_broke(server: HubServer) -> None:
    weights = zeros(25_000_000)
    sha = server.add("org/tiny", MODEL | {"model.safetensors": weights})
    server.drops["model.safetensors"] = [15_000_000]
    folder = hub.download("org/tiny", sha, lambda event: None)
    assert (folder / "model.safetensors").read_bytes() == weights
    first, second = server.asked("/cdn/")
    assert "range" not in first.headers
    assert second.headers["range"] == f"bytes={constants.DOWNLOAD_CHUNK_SIZE}-"  # the last whole piece of 10 MB


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_another_hash_is_refused_and_fetched_anew(server: HubServer, name: str) -> None:
    sha = server.add("org/tiny", MODEL)
    server.tampered[name] = b"[" + MODEL[name][1:]  # of the right size, which is all that huggingface_hub looks at
    error = fails_download(sha)
    assert (error.code, error.retryable) == ("hub_hash_mismatch", True)
    assert name in error.message
    server.tampered.clear()
    assert (hub.download("org/tiny", sha, lambda event: None) / name).read_bytes() == MODEL[name]


def test_the_steps_of_sentence_transformers_are_downloaded(server: HubServer) -> None:
    steps = {
        "modules.json": b'[{"path": "", "type": "Transformer"}, {"path": "2_Dense", "type": "models.Dense"}]',
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": safetensors("linear.weight"),
    }
    others = {"2_Dense/notes.md": b"x", "onnx/model.onnx": b"x", "onnx/config.json": b"{}"}
    sha = server.add("org/tiny", MODEL | steps | others)
    folder = hub.download("org/tiny", sha, lambda event: None)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {*MODEL, *steps}
    assert hub.read_headers("org/tiny")[0] == read_local(folder)
    assert module_files(folder) == ["2_Dense/config.json", "2_Dense/model.safetensors"]


def test_a_file_damaged_in_the_cache_is_seen(server: HubServer) -> None:
    sha = server.add("org/tiny", MODEL)
    path = hub.download("org/tiny", sha, lambda event: None) / "model.safetensors"
    path.write_bytes(b"X" + path.read_bytes()[1:])
    assert fails_download(sha).code == "hub_hash_mismatch"
    hub.download("org/tiny", sha, lambda event: None)


HOSTILE = {
    "index climbs": ({INDEX: index(a="../../secret/model.safetensors")}, "unsafe_path"),
    "index is absolute": ({INDEX: index(a="/etc/passwd")}, "unsafe_path"),
    "index names a pickle": ({INDEX: index(a="pytorch_model.bin"), "pytorch_model.bin": b"x"}, "unsafe_weights_format"),
    "index names none": ({INDEX: index(a="gone.safetensors")}, "missing_shard"),
    "index is a list": ({INDEX: b"[]"}, "invalid_json"),
    "index is deep": ({INDEX: b"[" * 100_000}, "invalid_json"),
    "tensor missing": ({INDEX: index(z="model.safetensors")}, "missing_tensors"),
    "weights are a link": ({"model.safetensors": b"../../../../etc/passwd"}, "corrupt_weights"),
    "config is a link": ({"config.json": b"/etc/passwd"}, "invalid_json"),
    "config is large": ({"config.json": b" " * (5 << 20)}, "config_implausible"),
    "header is large": ({"model.safetensors": struct.pack("<Q", 1 << 60) + b"{}"}, "corrupt_weights"),
    "truncated": ({"model.safetensors": MODEL["model.safetensors"][:-1]}, "corrupt_weights"),
    "empty": ({"model.safetensors": b""}, "corrupt_weights"),
    "already quantized": (
        {"config.json": b'{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}'},
        "already_quantized",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_or_broken_repository_is_refused_by_its_headers(server: HubServer, case: str) -> None:
    changes, code = HOSTILE[case]
    sha = server.add("org/tiny", MODEL | changes)
    error = fails()
    assert error.code == code
    assert "/tmp" not in str(error)
    with pytest.raises(ModelError) as local:  # and again by what was downloaded
        read_local(hub.download("org/tiny", sha, lambda event: None))
    assert local.value.code == code


def test_only_pickles_are_refused_by_name(server: HubServer) -> None:
    server.add("org/tiny", {"config.json": CONFIG, "pytorch_model.bin": b"cos\nsystem\n"})
    assert fails().code == "unsafe_weights_format"
    server.add("org/tiny", {"README.md": b"x"})
    error = fails()
    assert error.code == "no_config"
    assert "'org/tiny'" in error.message
    assert server.asked("pytorch_model.bin") == []


def test_names_that_are_no_plain_files_are_passed_over(server: HubServer) -> None:
    names = ("../model.safetensors", "a/b.safetensors", "/abs.safetensors", "x\\y.safetensors", "..", "n\0.safetensors")
    sha = server.add("org/tiny", MODEL | dict.fromkeys(names, b"bad"))
    hub.read_headers("org/tiny")
    assert "model.safetensors" in names_in(hub.download("org/tiny", sha, lambda event: None))


def test_a_link_in_the_cache_may_lead_to_its_blobs_only(tmp_path: Path) -> None:
    """The layout of huggingface_hub 2.4: a blob may itself be a link into the store that models share."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(CONFIG)
    weights = snapshot / "model.safetensors"
    for place, fine in (
        (cache / "models--org--tiny" / "blobs" / "b", True),
        (cache / "blobs" / "ab" / "b", True),
        (cache / "models--other--tiny" / "blobs" / "b", False),
        (tmp_path / "b", False),
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(MODEL["model.safetensors"])
        weights.unlink(missing_ok=True)
        weights.symlink_to(place)
        if fine:
            assert set(read_local(snapshot).tensors) == {"a", "b"}
        else:
            with pytest.raises(ModelError, match="leaves"):
                read_local(snapshot)


def int8() -> dict[str, object]:
    return {"global_quant_config": {"weight": {"dtype": "int8"}}}


@pytest.mark.parametrize(
    "model",
    [{}, {"model_id": "a/b"}, {"model_id": "a/b", "revision": "main"}, {"model_dir": "/m", "revision": "0" * 40}],
)
def test_a_task_names_one_model_and_a_commit(model: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"model_id|model_dir|pattern"):
        Task.model_validate({"output_dir": "/o", "config": int8(), **model})


@pytest.fixture
def quantize(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Task | None]]:
    """``quantize("org/tiny", ...)``: the command line's exit status, and the task it would have run."""
    tasks: list[Task] = []
    monkeypatch.setattr(running, "pipeline", lambda task, emit: tasks.append(task))
    monkeypatch.setattr(running, "proof_standing_by", nullcontext)
    monkeypatch.setattr(running, "check_task", lambda task: None)  # no model is in these folders
    monkeypatch.chdir(tmp_path)

    def run(model: str, *more: str) -> tuple[int, Task | None]:
        status = cli.main(["--model_dir", model, "--output_dir", "out", "--json", *more])
        return status, tasks.pop() if tasks else None

    return run


def test_the_command_line_takes_a_hub_id(
    server: HubServer, quantize: Callable[..., tuple[int, Task | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    old = server.add("org/tiny", MODEL)
    new = server.add("org/tiny", MODEL | {"LICENSE": b"freer"})
    for more, sha in (((), new), (("--revision", old), old)):
        status, task = quantize("org/tiny", *more)
        assert status == 0 and task is not None
        assert (task.model_dir, task.model_id, task.revision) == (None, "org/tiny", sha)
    assert quantize("org/none") == (1, None)
    assert json.loads(capsys.readouterr().out)["code"] == "hub_not_found"


def test_the_command_line_takes_a_folder_first(
    server: HubServer, quantize: Callable[..., tuple[int, Task | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("org/tiny").mkdir(parents=True)
    for model in ("org/tiny", "./org/none", "/org/none"):
        _, task = quantize(model)
        assert task is not None and task.model_dir == Path(model).absolute()
    assert quantize("org/tiny", "--revision", "main") == (1, None)
    assert "--revision" in json.loads(capsys.readouterr().out)["message"]
    assert server.requests == []


def test_a_tokenizer_comes_without_the_weights(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("org/tiny", MODEL | {"tokenizer.model": b"pieces", "pytorch_model.bin": b"pickle"})
    folder = hub.download_tokenizer("org/tiny")
    assert names_in(folder) == {"config.json", "tokenizer.json", "tokenizer.model", "LICENSE"}
    assert server.asked(".safetensors") == []
    monkeypatch.setattr(hub, "MAX_TOKENIZER_BYTES", 10)
    with pytest.raises(ModelError, match="larger than") as error:
        hub.download_tokenizer("org/tiny")
    assert error.value.code == "config_implausible"
