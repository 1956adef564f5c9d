"""``compare NEW OLD --against ORIGINAL``: says which of two results is worse, and runs the original once."""

import json
import shutil

import pytest

from quantcore.cli import main as cli
from quantcore.cli.flags import COMPARED_TOKENS, comparing
from quantcore.cli.from_flags import compared_text_of
from quantcore.cli.running import WORSE
from quantcore.config.task import EvaluationConfig
from quantcore.engine.commands.compare import measure_change
from quantcore.engine.commands.evaluate import evaluate
from quantcore.engine.evaluation.baseline_cache import VARIABLE
from quantcore.engine.evaluation.inputs import held_out_text
from quantcore.engine.model.kinds import declared_class
from quantcore.engine.model.tiny_model import build_tiny_model
from quantcore.engine.pipeline.job import run
from quantcore.engine.runtime.streamed_model import StreamedModel
from quantcore.errors import CalibrationError, ConfigError
from tests.support.jobs import task
from tests.support.models import tiny_model
from tests.support.proofs import proving_here
from tests.support.tokenizers import save_byte_tokenizer

NUM_WINDOWS, SEQ_LEN = 24, 64
TEXT = ["--num_eval_data", str(NUM_WINDOWS), "--eval_seq_len", str(SEQ_LEN)]
SHORT = EvaluationConfig(num_windows=NUM_WINDOWS, seq_len=SEQ_LEN)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and its results int8 and w4a16."""
    base = tmp_path_factory.mktemp("results")
    tiny_model(base / "model", rank=8)
    with proving_here():
        for preset in ("int8", "w4a16"):
            asked = task(base / "model", base / preset, preset)
            run(asked.model_copy(update={"evaluation": EvaluationConfig(num_windows=0)}), lambda event: None)
    return base


@pytest.fixture
def compare(folders, monkeypatch, capsys):
    """``compare("int8", "w4a16", "--json")``: the exit status, stdout and stderr."""
    monkeypatch.chdir(folders)

    def compare(*arguments, against="model"):
        status = cli.main(["compare", *arguments, "--against", str(against), *TEXT])
        return status, *capsys.readouterr()

    return compare


def test_fewer_bits_are_worse_and_more_are_better(compare, folders):
    status, out, _ = compare("w4a16", "int8", "--json")
    worse = json.loads(out)
    assert (status, worse["verdict"], worse["new"], worse["old"]) == (WORSE, "worse", "w4a16", "int8")
    status, out, _ = compare("int8", "w4a16", "--json")
    better = json.loads(out)
    assert (status, better["verdict"]) == (0, "better")
    assert 0 < worse["kl_change"]["low"] < worse["kl_change"]["value"] < worse["kl_change"]["high"]
    assert (1 + worse["kl_change"]["low"]) * (1 + better["kl_change"]["high"]) == pytest.approx(1, rel=1e-9)
    assert worse["top1_difference"]["value"] == pytest.approx(-better["top1_difference"]["value"], rel=1e-9)
    assert worse["new_quality"] == better["old_quality"]
    alone = evaluate(str(folders / "w4a16"), str(folders / "model"), SHORT, lambda event: None).to_dict()
    assert worse["new_quality"] == json.loads(json.dumps(alone["quality"])), "as evaluate measures it"
    means = [worse[f"{which}_quality"]["divergence"]["kl_mean"]["value"] for which in ("new", "old")]
    assert worse["kl_change"]["value"] == pytest.approx(means[0] / means[1] - 1, rel=1e-9)


def test_a_person_reads_the_verdict_and_what_the_text_could_have_shown(compare):
    status, out, _ = compare("w4a16", "int8", "--tolerance", "100000%")
    assert status == 0 and "no difference found beyond the tolerance of 100000 %: w4a16 against int8" in out
    assert f"{NUM_WINDOWS * (SEQ_LEN - 1)} tokens in {NUM_WINDOWS} windows" in out
    status, out, _ = compare("w4a16", "int8", "--tolerance", "1%")
    assert status == WORSE and "worse beyond the tolerance of 1 %" in out
    status, out, _ = compare("int8", "int8")
    assert status == 0 and "no difference found: int8 against int8" in out


def test_several_results_of_a_recipe_are_compared_by_their_means(compare, folders):
    status, out, _ = compare("w4a16,int8,w4a16", "int8,w4a16,int8", "--json")
    found = json.loads(out)
    one, other = (found[f"{side}_quality"]["divergence"]["kl_mean"]["value"] for side in ("new", "old"))
    assert one / other - 1 == pytest.approx(found["kl_change"]["value"])
    assert (status, found["verdict"], found["num_results"]) == (0, "no difference found", [3, 3])
    assert found["seed_deviation"] > 0.5 and found["new"].count("w4a16") == 2
    assert "from seed to seed" in compare("w4a16,int8,w4a16", "int8,w4a16,int8")[1]
    status, _, err = compare("w4a16,int8", "w4a16")
    assert status == 1 and "too few" in err and "six in total" in err


def test_the_original_is_run_once(compare, tmp_path, monkeypatch):
    """Without the cache, too; and what the cache has of it is used."""
    seen, embed = [], StreamedModel.embed

    def watched(self, windows_NT, *given, **named):
        seen.append(len(windows_NT))
        return embed(self, windows_NT, *given, **named)

    monkeypatch.setattr(StreamedModel, "embed", watched)
    runs = []
    for entries in ("", str(tmp_path), str(tmp_path)):
        monkeypatch.setenv(VARIABLE, entries)
        seen.clear()
        assert compare("int8", "w4a16")[0] == 0
        runs.append(seen.count(NUM_WINDOWS))
    assert runs == [3, 3, 2]


def test_a_result_of_another_model_is_refused(compare, folders, tmp_path):
    """Its report tells, else its shapes; a result without a report and with the right shapes is measured."""
    tiny_model(tmp_path / "other", rank=8, seed=1)
    tiny_model(tmp_path / "small", rank=8, num_hidden_layers=2)
    shutil.copytree(folders / "int8", tmp_path / "bare", ignore=shutil.ignore_patterns("report.json"))
    for new, against in (("int8", tmp_path / "other"), (str(tmp_path / "small"), "model")):
        status, _, err = compare(new, "w4a16", against=against)
        assert status == 1 and "not_comparable" in err and "made from a different model" in err
    assert compare(str(tmp_path / "bare"), "w4a16")[0] == 0
    report = json.loads((folders / "int8" / "report.json").read_text())
    report["provenance"]["model"] = f"hub:org/tiny@{'0' * 40}"
    (tmp_path / "bare" / "report.json").write_text(json.dumps(report))
    assert compare(str(tmp_path / "bare"), "w4a16")[0] == 0, "a folder may hold the model of the Hub"


def test_what_cannot_be_measured_is_said(compare, tmp_path, capsys):
    for new, code in (("nothing", "model_not_found"), (str(tmp_path), "")):
        status, _, err = compare(new, "int8")
        assert status == 1 and code in err and "Traceback" not in err
    for arguments, fault in (
        (["int8", "--against", "model"], "NEW and OLD"),
        (["int8", "w4a16", "int8", "--against", "model"], "NEW and OLD"),
        (["int8", "w4a16", "--tolerance", "5%"], "--tolerance needs --against"),
        (["int8", "w4a16", "--against", "model", "--tolerance", "5"], "not a percentage"),
        (["int8", "w4a16", "--against", "model", "--tolerance=-5%"], "not a percentage"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["compare", *arguments])
        assert ended.value.code == 2 and fault in capsys.readouterr().err


def test_by_default_the_text_has_64k_tokens_or_all_that_there_are(folders):
    def windows(*flags):
        asked = compared_text_of(comparing().parse_args(["new", "old", "--against", "model", *flags]))
        return asked.num_windows, asked.seq_len

    assert windows() == (128, 512) and COMPARED_TOKENS == 128 * 512
    assert windows("--eval_seq_len", "2048") == (32, 2048)
    assert windows("--eval_dataset", "text.txt", "--eval_stride", "256") == (255, 512)
    assert windows("--num_eval_data", "9") == (9, 512)
    most = EvaluationConfig(num_windows=1 << 20, seq_len=256)
    text = held_out_text(folders / "model", most, fewer=True)
    assert 100 < len(text.ids_NT) < 1 << 20
    with pytest.raises(CalibrationError):
        held_out_text(folders / "model", most)


def test_masked_tokens_are_compared_and_embeddings_refused(tmp_path):
    config = {
        "model_type": "bert", "vocab_size": 320, "max_position_embeddings": 64, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128,
    }  # fmt: skip
    for name in ("BertForMaskedLM", "BertModel"):
        for seed in range(3):
            asked = config | {"architectures": [name]}
            build_tiny_model(asked, seed, declared_class(asked)).save_pretrained(tmp_path / f"{name}{seed}")
            save_byte_tokenizer(tmp_path / f"{name}{seed}", of_encoder=True)
    new, old, original = (str(tmp_path / f"BertForMaskedLM{seed}") for seed in (1, 2, 0))
    found = measure_change([new], [old], original, SHORT, lambda event: None)
    assert 0.05 < found.new_quality.num_tokens / (NUM_WINDOWS * SEQ_LEN) < 0.3, "those that are masked"
    new, old, original = (str(tmp_path / f"BertModel{seed}") for seed in (1, 2, 0))
    with pytest.raises(ConfigError, match="does not predict tokens"):
        measure_change([new], [old], original, SHORT, lambda event: None)
