"""A result is measured by a reference as it is beside its original, which need not be there any more."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from quantcore.cli import main as cli
from quantcore.engine.evaluation import reference as references
from quantcore.engine.evaluation.divergence import measure
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.pipeline.job import run
from quantcore.engine.runtime.vocabulary import Vocabulary
from tests.support.jobs import task
from tests.support.models import tiny_model

FLAGS = ["--num_eval_data", "4", "--eval_seq_len", "64"]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("chat") / "model", rank=8, max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(chat_model, tmp_path_factory):
    """A result of the model, and the model's reference."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "NUM_TOP", 100_000)  # all of the vocabulary: nothing is left out
        run(task(chat_model, folder / "out", "w4a16"), lambda event: None)
        assert cli.main(["reference", str(chat_model), "-o", str(folder / "original.safetensors"), *FLAGS]) == 0
    return folder / "out", folder / "original.safetensors"


class Head:
    """The part of a model around its blocks, of which only the head matters here."""

    def __init__(self, weight_VH):
        self.linear = torch.nn.Linear(*weight_VH.shape[::-1], bias=False)
        self.linear.weight.data = weight_VH
        self.model = SimpleNamespace(get_output_embeddings=lambda: self.linear)

    def __call__(self, state):
        return self.linear(state)


def measured(capsys, *arguments):
    assert cli.main(["evaluate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_gives_what_the_original_gives(made, chat_model, tmp_path, capsys):
    """To the last digits, with all predictions; the model itself may be gone."""
    out, file = made
    beside = measured(capsys, out, "--against", chat_model, *FLAGS)
    by_file = measured(capsys, out, "--reference", file)
    for part in ("quality", "answers"):
        assert by_file[part]["num_tokens"] == beside[part]["num_tokens"]
        assert by_file[part]["before"]["token_perplexity"] == pytest.approx(beside[part]["before"]["token_perplexity"])
        assert by_file[part]["after"] == beside[part]["after"]
        distance, expected = by_file[part]["divergence"], beside[part]["divergence"]
        assert distance["kl_mean"] == pytest.approx(expected["kl_mean"], rel=1e-4)
        assert distance["kl_p99"] == pytest.approx(expected["kl_p99"], rel=1e-3)
        assert distance["top1_agreement"] == expected["top1_agreement"]
        assert distance["logit_error"] is None
    kinds = [{each["kind"]: each["num_tokens"] for each in one["answers"]["by_kind"]} for one in (by_file, beside)]
    assert kinds[0] == kinds[1] and len(kinds[0]) > 3
    assert by_file["verdict"]["level"] == beside["verdict"]["level"]
    assert by_file["against"] == str(chat_model) and by_file["reference"]["identity"].startswith("sha256:")


def test_the_other_tokens_are_represented_by_a_sample():
    """On random logits, beside the exact divergence; with all tokens listed it is exact."""
    torch.manual_seed(0)
    weights = torch.randn(2, 50, 16) / 3
    states = [torch.randn(1, 60, 16) for _ in range(20)]
    text = EvaluationText(torch.randint(50, (20, 61)), torch.ones(20, dtype=torch.long), 0, 0)
    original, other = (Vocabulary(Head(matrix), (range(20), range(20, 50))) for matrix in weights)
    exact = measure(other, states, text, (original, states)).distances_NP4
    errors = []
    for num_top in (1, 4, 16, 50):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(references, "NUM_TOP", num_top)
            predictions = references.predictions_of(original, states, text)
        found = references.measure_against(predictions, other, states, text)
        assert torch.equal(found.distances_NP4[..., 1], exact[..., 1])
        errors.append(found.distances_NP4[..., 0] - exact[..., 0])
    mean = exact[..., 0].mean()
    assert all(error.mean().abs() < 0.01 * mean for error in errors), [error.mean() / mean for error in errors]
    assert errors[0].abs().mean() > 3 * errors[2].abs().mean() and errors[3].abs().max() < 1e-5


def test_a_gate_reads_the_verdict(made, tmp_path, capsys):
    out, file = made
    worse = tmp_path / "worse"
    shutil.copytree(out, worse)
    for path in worse.glob("*.safetensors"):
        tensors = load_file(path)
        save_file(
            {name: tensor * 3 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, path
        )
    statuses = {name: cli.main(["evaluate", str(folder), "--reference", str(file), "--gate", "fail"])
                for name, folder in (("worse", worse),)}  # fmt: skip
    assert statuses == {"worse": 3}
    assert "The gate failed: the verdict is broken" in capsys.readouterr().err
    assert cli.main(["evaluate", str(worse), "--reference", str(file)]) == 0


@pytest.mark.parametrize("change", ["text", "cut", "other numbers"])
def test_a_file_that_is_none_is_refused(change, made, tmp_path, capsys):
    out, file = made
    broken = tmp_path / "broken.safetensors"
    if change == "text":
        broken.write_text("no reference")
    elif change == "cut":
        broken.write_bytes(file.read_bytes()[:-1000])
    else:
        save_file({"text.ids": torch.zeros(2, 2)}, broken)
    assert cli.main(["evaluate", str(out), "--reference", str(broken)]) == 1
    assert "is not a reference" in capsys.readouterr().err


def test_another_tokenizer_is_refused(made, tmp_path, capsys):
    out, file = made
    other = tmp_path / "other"
    shutil.copytree(out, other)
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    by_id = {number: word for word, number in vocabulary.items()}
    used = references.read(file).text.ids_NT.flatten().unique().tolist()
    first, second = [by_id[number] for number in used if number in by_id][-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(words))
    assert cli.main(["evaluate", str(other), "--reference", str(file)]) == 1
    assert "whose tokenizer is another" in capsys.readouterr().err


def test_flags_that_do_not_fit_are_named(made, capsys):
    out, file = made
    for flags, why in (
        (["--reference", str(file), "--against", "x"], "remove --against"),
        (["--gate", "fail"], "needs an original"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["evaluate", str(out), *flags])
        assert why in capsys.readouterr().err
