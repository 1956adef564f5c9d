"""Jobs that are killed and go on: the same bytes as undisturbed, wherever that was and on however many ranks."""

import json
import shlex
import signal
from functools import cache

import pytest

from quantcore.checkpoint.artifact import sha256
from quantcore.cli.main import main
from quantcore.engine.blockwise import savepoint
from quantcore.engine.pipeline import writer as writing
from quantcore.report import local_runs
from tests.support.forks import config, events_of, forked, killed, seen_of, task_file
from tests.support.models import MIXTURES, tiny_model
from tests.support.params import with_rare

pytestmark = pytest.mark.usefixtures("proof_in_this_process")

NUM_BLOCKS = 4
WINDOWS = {"num_samples": 34, "seq_len": 32}  # two chunks: one of three ranks has none
GIVEN = {
    "dense": config("w4a16", {"name": "rotation"}, {"name": "awq"}, {"name": "yaqa"}),
    "mixture": config("fp8", {"name": "gptq"}),
}
MODELS = {"dense": {}, "mixture": {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """``undisturbed(name)``: a model's folder, and what a job makes of it."""

    @cache
    def run(name):
        folder = tmp_path_factory.mktemp(name)
        model_dir = tiny_model(folder / "model", num_hidden_layers=NUM_BLOCKS, **MODELS[name])
        file = task_file(model_dir, folder / "out", GIVEN[name], calibration=WINDOWS)
        assert forked(lambda _: main(["run", str(file)]), 1, folder) == [0]
        return model_dir, seen_of(folder, folder / "out")

    return run


def going_on(folder, model_dir, name, *, kill, ranks=(1, 1), monkeypatch, **more):
    """Run a job that is killed as ``kill`` says, then again.

    Returns the block at which it continues, as the killed one said last, and the events of the second time.
    """
    monkeypatch.setattr(savepoint, "MIN_WORK_PER_SAVE", 0)  # after every block
    file = task_file(
        model_dir, folder / "out", GIVEN[name], calibration=WINDOWS, resume_dir=str(folder / "resume"), **more
    )

    def first(rank):
        if rank == ranks[0] - 1:
            monkeypatch.setattr(kill[0], kill[1], killed(*kill))
        return main(["run", str(file)])

    statuses = forked(first, ranks[0], folder)
    assert statuses[-1] == -signal.SIGKILL and not (folder / "out").exists()
    next_block = max((event["next_block"] for event in events_of(folder) if event["kind"] == "saved"), default=0)
    statuses = forked(lambda _: main(["run", str(file)]), ranks[1], folder)
    assert statuses == [0] * ranks[1], (folder / "err.0").read_text()
    assert not (folder / "resume").exists()
    return next_block, events_of(folder)


KILLS = {
    "in the first block": (writing.ResultWriter, "write", 2),
    "in the second block": (writing.ResultWriter, "tell", 9),
    "while the states are written": (savepoint, "_write_states", 7),
    "before the state counts": (savepoint, "_replace", 2),
    "in the third block": (writing.ResultWriter, "write", 18),
    "behind the blocks": (writing.ResultWriter, "finish", 1),
}


@pytest.mark.parametrize("kill", with_rare(KILLS, KILLS.keys() - {"in the first block"}))
def test_killed_anywhere_it_goes_on(undisturbed, tmp_path, monkeypatch, kill):
    model_dir, expected = undisturbed("dense")
    next_block, events = going_on(tmp_path, model_dir, "dense", kill=KILLS[kill], monkeypatch=monkeypatch)
    files, before, after, _, layers = seen_of(tmp_path, tmp_path / "out")
    assert (files, before, after, layers) == (expected[0], expected[1], expected[2], expected[4])
    again = {event["block"] for event in events if event["kind"] == "layer_quantized"}
    assert again == set(range(next_block, NUM_BLOCKS)) and (next_block == 0) == (kill == "in the first block")


@pytest.mark.slow
@pytest.mark.parametrize("place", with_rare([1000, 0, -1], [0, -1]))
def test_a_damaged_state_is_seen_and_the_job_begins_anew(undisturbed, tmp_path, monkeypatch, place):
    model_dir, expected = undisturbed("dense")
    load = savepoint.SavePoint.load

    def load_damaged(self):
        for path in self.folder.glob("states-*/*"):
            content = bytearray(path.read_bytes())
            content[place] ^= 1
            path.write_bytes(content)
        return load(self)

    monkeypatch.setattr(savepoint.SavePoint, "load", load_damaged)  # the first time there is nothing to damage
    kill = KILLS["in the third block"]
    _, events = going_on(tmp_path, model_dir, "dense", kill=kill, monkeypatch=monkeypatch)
    files, before, after, _, layers = seen_of(tmp_path, tmp_path / "out")
    assert (files, before, after, layers) == (expected[0], expected[1], expected[2], expected[4])
    again = {event["block"] for event in events if event["kind"] == "layer_quantized"}
    assert again == set(range(NUM_BLOCKS))


@pytest.mark.slow
@pytest.mark.parametrize("name", with_rare(MODELS, ["mixture"]))
def test_it_goes_on_with_another_number_of_ranks(undisturbed, tmp_path, monkeypatch, name):
    model_dir, expected = undisturbed(name)
    kill = (writing.ResultWriter, "tell", 3)
    going_on(tmp_path, model_dir, name, kill=kill, ranks=(3, 2), monkeypatch=monkeypatch)
    files, before, after, _, layers = seen_of(tmp_path, tmp_path / "out")
    assert (files, before, after, layers) == (expected[0], expected[1], expected[2], expected[4])


@pytest.mark.slow
def test_another_job_begins_anew(undisturbed, tmp_path, monkeypatch):
    model_dir, _ = undisturbed("dense")
    monkeypatch.setattr(savepoint, "MIN_WORK_PER_SAVE", 0)
    resume = tmp_path / "resume"
    file = task_file(model_dir, tmp_path / "out", GIVEN["dense"], calibration=WINDOWS, resume_dir=str(resume))

    def first(_):
        monkeypatch.setattr(writing.ResultWriter, "finish", killed(writing.ResultWriter, "finish", 1))
        return main(["run", str(file)])

    assert forked(first, 1, tmp_path) == [-signal.SIGKILL]
    assert json.loads((resume / "state.json").read_text())["next_block"] == NUM_BLOCKS - 1
    assert len(list(resume.glob("states-*"))) == 1
    other = GIVEN["dense"] | {"exclude": ["lm_head", "*.q_proj"]}
    task_file(model_dir, tmp_path / "out", other, calibration=WINDOWS, resume_dir=str(resume))
    assert forked(lambda _: main(["run", str(file)]), 1, tmp_path) == [0]
    blocks = [event["block"] for event in events_of(tmp_path) if event["kind"] == "layer_quantized"]
    assert set(blocks) == set(range(NUM_BLOCKS))


CONTAINERS = {"gguf": "gguf_q4_0", "onnx": "w4a16"}


@pytest.mark.slow
@pytest.mark.parametrize("export", with_rare(CONTAINERS, ["onnx"]))
def test_a_format_of_one_file_goes_on(undisturbed, tmp_path, monkeypatch, export):
    model_dir, _ = undisturbed("dense")
    monkeypatch.setitem(GIVEN, "dense", config(CONTAINERS[export], {"name": "gptq"}))
    monkeypatch.setattr(savepoint, "MIN_WORK_PER_SAVE", 0)
    file = task_file(model_dir, tmp_path / "whole", GIVEN["dense"], (export, "fake_quantized"), calibration=WINDOWS)
    assert forked(lambda _: main(["run", str(file)]), 1, tmp_path) == [0]
    next_block, events = going_on(
        tmp_path, model_dir, "dense", kill=KILLS["in the third block"], monkeypatch=monkeypatch,
        exports=(export, "fake_quantized"), ranks=(2, 1),
    )  # fmt: skip
    assert 0 < next_block < NUM_BLOCKS
    again = {event["block"] for event in events if event["kind"] == "layer_quantized"}
    assert again == set(range(next_block, NUM_BLOCKS))
    weights = [
        path for path in (tmp_path / "whole").rglob("*") if path.suffix in (".gguf", ".onnx", ".data", ".safetensors")
    ]
    assert len(weights) >= 2
    for path in weights:
        assert sha256(path) == sha256(tmp_path / "out" / path.relative_to(tmp_path / "whole")), path.name


def interrupted(owner, name, count):
    """``owner.name`` unchanged, except that call number ``count`` is Ctrl-C."""
    whole, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append(1)
        if len(calls) == count:
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    return call


def test_an_interrupted_command_goes_on_when_it_is_repeated(tmp_path, monkeypatch, capsys):
    model_dir = tiny_model(tmp_path / "model", num_hidden_layers=NUM_BLOCKS)
    monkeypatch.setattr(savepoint, "MIN_WORK_PER_SAVE", 0)
    flags = ["w4a16", "--num_calib_data", "4", "--seq_len", "32", "--skip_evaluation", "--model_export", "quark"]
    assert main(["quantize", str(model_dir), *flags, "-o", str(tmp_path / "whole")]) == 0
    line = ["quantize", str(model_dir), *flags, "-o", str(tmp_path / "out")]
    capsys.readouterr()

    with monkeypatch.context() as patch:
        patch.setattr(writing.ResultWriter, "write", interrupted(writing.ResultWriter, "write", 2))
        assert main(line) == 130
    assert "Interrupted. Nothing was saved yet, and nothing is left." in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"model", "whole"}

    with monkeypatch.context() as patch:
        patch.setattr(writing.ResultWriter, "write", interrupted(writing.ResultWriter, "write", 18))
        assert main(line) == 130
    said = capsys.readouterr().err
    assert f"Interrupted. 2 of {NUM_BLOCKS} blocks are saved in {tmp_path / '.out.resume'}." in said
    assert f"\n  {shlex.join(['bitfoundry', *line])}\n" in said

    assert main(line) == 0
    assert f"continues after block 2 of {NUM_BLOCKS}, which an earlier run saved" in capsys.readouterr().err
    assert sha256(tmp_path / "out" / "model.safetensors") == sha256(tmp_path / "whole" / "model.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "whole", "out"}
    assert [(run.name, run.config) for run in local_runs.runs()[:2]] == [("out", "w4a16"), ("whole", "w4a16")]


def test_the_progress_of_another_task_is_not_taken_and_that_is_said(tmp_path, monkeypatch, capsys):
    model_dir = tiny_model(tmp_path / "model", num_hidden_layers=NUM_BLOCKS)
    monkeypatch.setattr(savepoint, "MIN_WORK_PER_SAVE", 0)
    line = ["quantize", str(model_dir), "-o", str(tmp_path / "out"), "--file2file_quantization", "--skip_evaluation"]
    with monkeypatch.context() as patch:
        patch.setattr(writing.ResultWriter, "finish", interrupted(writing.ResultWriter, "finish", 1))
        assert main([*line, "int8_weight_only"]) == 130
    assert "blocks are saved in" in capsys.readouterr().err
    assert main([*line, "w4a16_sym"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "holds the progress of another job" in said and "continues after" not in said
    assert not (tmp_path / ".out.resume").exists()
