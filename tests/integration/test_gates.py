"""Every gate passes a good model and catches a bad one; what is rejected is kept apart."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from api.store import manifest
from quantcore.engine.blockwise.algorithms import BlockAlgorithms
from quantcore.engine.pipeline.job import run
from quantcore.engine.verification import gate_inputs, gates
from quantcore.errors import GateError, ModelError, NumericsError, ProofError
from quantcore.events import GatesJudged, LayerQuantized, Warned
from quantcore.report.quality import Sample
from tests.support.jobs import task
from tests.support.models import tiny_model
from tests.support.proofs import proving_here

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """With rows of very different sizes, as real weights have."""
    folder = tiny_model(tmp_path_factory.mktemp("tiny") / "model", rank=8)
    weights = load_file(folder / "model.safetensors")
    sizes = torch.linspace(-1.5, 1.5, 128).exp()[:, None]
    weights[f"{LAYER}.weight"] = (weights[f"{LAYER}.weight"].float() * sizes).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def job(model_dir, output_dir, preset, gate, **changes):
    return task(model_dir, output_dir, preset, **changes).model_copy(update={"gate": gate})


def flip_scales(params, codes):
    return replace(params, scale=params.scale.flip(0)), codes


def zero(params, codes):
    return params, torch.zeros_like(codes)


def move_zero_point(params, codes):
    return replace(params, zero_point=params.zero_point + 1), codes


MUTANTS = {
    "swapped scales": ("int8_weight_only", flip_scales),
    "zeroed layer": ("w4a16_sym", zero),
    "zero point off by one": ("w4a16", move_zero_point),
}


def break_layer(monkeypatch, mutate):
    """One layer's codes or parameters are wrong in memory already: files and memory agree."""
    solve = BlockAlgorithms.solve

    def broken(self, at, layers, prepared):
        for solved in solve(self, at, layers, prepared):
            if solved.layer.name != LAYER:
                yield solved
                continue
            params, codes = mutate(solved.quantized.params, solved.quantized.codes)
            mutant = replace(solved, quantized=replace(solved.quantized, params=params, codes=codes))
            layers[solved.layer].weight.data = mutant.restored_OI.to(torch.bfloat16)
            yield mutant

    monkeypatch.setattr(BlockAlgorithms, "solve", broken)


@pytest.mark.parametrize("preset", ["int8_weight_only", "w4a16", "w4a16_sym", "fp8"])
def test_a_good_model_passes(preset, model_dir, tmp_path, proof_in_this_process):
    report = run(job(model_dir, tmp_path / "out", preset, "fail", num_prompts=4), lambda event: None).to_dict()
    assert {row["status"] for row in report["summary"]["gates"]} <= {"pass", "skipped"}
    assert [row["gate"] for row in report["summary"]["gates"] if row["status"] == "skipped"] == (
        ["G3", "G6"] if preset == "fp8" else ["G2", "G3", "G5", "G6", "G11"]
    )


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_layer_is_caught_and_kept_apart(mutant, model_dir, tmp_path, monkeypatch, proof_in_this_process):
    preset, mutate = MUTANTS[mutant]
    break_layer(monkeypatch, mutate)
    events = []
    with pytest.raises(GateError) as caught:
        run(job(model_dir, tmp_path / "out", preset, "fail"), events.append)
    assert caught.value.code == "gate_failed" and caught.value.message.startswith("Lowest SQNR of a weight ")
    assert LAYER in caught.value.message
    [rejected] = tmp_path.iterdir()
    assert rejected.name == "out.rejected"
    manifest.check(rejected, manifest.read(rejected))
    [judged] = [event for event in events if isinstance(event, GatesJudged)]
    written = json.loads((rejected / "report.json").read_text())
    assert written["summary"]["gates"] == judged.results
    assert (written["summary"]["verdict"], written["samples"]) == (judged.verdict, judged.samples)  # no job shows them
    assert not [event for event in events if event.kind == "completed"]
    with pytest.raises(GateError):  # nothing is overwritten
        run(job(model_dir, tmp_path / "out", preset, "fail"), lambda event: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.rejected", "out.rejected-2"]


@pytest.mark.parametrize("gate", ["warn", "off"])
def test_who_asks_for_no_more_gets_the_artifact(gate, model_dir, tmp_path, monkeypatch, proof_in_this_process):
    break_layer(monkeypatch, zero)
    events = []
    report = run(job(model_dir, tmp_path / "out", "w4a16_sym", gate), events.append).to_dict()
    said = [event.message for event in events if isinstance(event, Warned) and event.code == "gate_failed"]
    assert all(event.verdict is None for event in events if isinstance(event, GatesJudged))
    assert report["summary"]["gate"] == gate and (tmp_path / "out" / "report.json").exists()
    if gate == "off":
        assert not said and report["summary"]["gates"] == []
        return
    assert said and said[0].startswith("Lowest SQNR of a weight ")
    assert "fail" in {row["status"] for row in report["summary"]["gates"]}


def test_nan_is_no_artifact_whatever_the_gate(model_dir, tmp_path, monkeypatch, proof_in_this_process):
    def spoil(params, codes):
        scale = params.scale.clone()
        scale[3] = torch.nan
        return replace(params, scale=scale), codes

    break_layer(monkeypatch, spoil)
    with pytest.raises(NumericsError) as caught:
        run(job(model_dir, tmp_path / "out", "w4a16", "off"), lambda event: None)
    assert caught.value.code == "nonfinite_result" and LAYER in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_lost_shard_is_no_artifact_whatever_the_gate(model_dir, tmp_path, monkeypatch, proof_in_this_process):
    def lose(task, folder, expected, emit):
        sorted(folder.glob("model-*.safetensors"))[1].unlink()
        return proof_in_this_process(task, folder, expected, emit)

    monkeypatch.setattr("quantcore.engine.pipeline.job.prove_in_fresh_process", lose)
    given = job(model_dir, tmp_path / "out", "w4a16", "off", max_shard_size="50KB")
    with pytest.raises((ModelError, ProofError)) as caught:
        run(given, lambda event: None)
    assert caught.value.code in {"missing_shard", "proof_layout_differs"}
    assert list(tmp_path.iterdir()) == []


def test_a_failure_to_generate_costs_no_artifact(model_dir, tmp_path, monkeypatch, proof_in_this_process):
    def fail(*given, **named):
        raise RuntimeError("no cache for this model")

    monkeypatch.setattr("quantcore.engine.evaluation.generation.generate", fail)
    events = []
    report = run(job(model_dir, tmp_path / "out", "w4a16", "fail", num_prompts=4), events.append).to_dict()
    [said] = [event.message for event in events if isinstance(event, Warned) and event.code == "samples_failed"]
    assert "no cache for this model" in said and report["samples"] is None
    assert {row["gate"]: row["status"] for row in report["summary"]["gates"]}["G9"] == "skipped"


@pytest.fixture(scope="module")
def evidence(model_dir, tmp_path_factory):
    """What a good job with static activations shows."""
    seen = []
    with pytest.MonkeyPatch.context() as patch, proving_here():
        patch.setattr(gate_inputs, "judge", lambda one: seen.append(one) or gates.judge(one))
        run(job(model_dir, tmp_path_factory.mktemp("out") / "out", "fp8", "fail", num_prompts=4), lambda event: None)
    return seen[0]


def with_main(seen, **changes):
    name = seen.plan.main_export
    return replace(seen, proofs={**seen.proofs, name: replace(seen.proofs[name], **changes)})


def with_quality(seen, name, value):
    quality, part = seen.main.quality, seen.main.quality if name == "ratio" else seen.main.quality.divergence
    spoiled = part.replace(**{name: getattr(part, name).replace(value=value)})
    return with_main(seen, quality=spoiled if name == "ratio" else quality.replace(divergence=spoiled))


def with_layer(seen, **changes):
    return replace(seen, layers=[replace(seen.layers[0], **changes), *seen.layers[1:]])


def with_expert(seen):
    expert = LayerQuantized("model.layers.0.mlp.experts.0.up_proj", 0, 0.01, 40.0, "fp8", num_tokens=3)
    return replace(seen, layers=[*seen.layers, expert])


BAD_SAMPLE = Sample(prompt="", original="", quantized="", quantized_is_degenerate=True, original_is_degenerate=False)
BAD = {
    "finite_numbers": (lambda seen: with_main(seen, invalid_numbers=("q_proj: the scales of its weight",)), "fail"),
    "calibration_coverage": (
        lambda seen: replace(seen, warnings=[Warned("layer_saw_few_tokens", "q_proj saw 3")]), "fail"
    ),
    "expert_coverage": (lambda seen: with_expert(with_layer(seen, num_tokens=5000)), "warn"),
    "layer_sqnr_db": (lambda seen: with_layer(seen, sqnr_db=3.0), "fail"),
    "not_worse_than_rounding": (lambda seen: with_layer(seen, output_error=0.11, rounding_error=0.1), "fail"),
    "fallbacks": (lambda seen: replace(seen, warnings=[Warned("solver", "damping was raised")] * 2), "fail"),
    "clipping": (lambda seen: with_main(seen, clipping=("q_proj input", 0.02)), "fail"),
    "folding": (lambda seen: replace(seen, edges=[{"largest_change_by_folding": 1.0}]), "fail"),
    "round_trip": (lambda seen: with_main(seen, max_logit_difference=0.1), "fail"),
    "perplexity_ratio": (lambda seen: with_quality(seen, "ratio", 3.0), "fail"),
    "kl_mean": (lambda seen: with_quality(seen, "kl_mean", 3.0), "fail"),
    "top1_agreement": (lambda seen: with_quality(seen, "top1_agreement", 0.01), "fail"),
    "generation": (lambda seen: with_main(seen, samples=(BAD_SAMPLE,)), "fail"),
    "side_files": (lambda seen: replace(seen, differing_files=["quark/tokenizer.json"]), "fail"),
    "overlap": (lambda seen: replace(seen, overlap=0.5), "warn"),
    "provenance": (lambda seen: replace(seen, missing_provenance=["model"]), "fail"),
    "size": (lambda seen: replace(seen, sizes={"quark": (103, 100)}), "fail"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_gate_sees_its_own_fault(name, evidence):
    spoil, status = BAD[name]
    results = {row.name: row for row in gates.judge(spoil(evidence))}
    assert results[name].status == status and results[name].value != results[name].limit
    assert {row.name for row in results.values() if row.status in ("warn", "fail")} == {name}


def test_every_gate_has_a_fault_above(evidence):
    assert {row.name for row in gates.judge(evidence)} <= BAD.keys()
    assert [row.gate for row in gates.judge(evidence)] == sorted(
        (row.gate for row in gates.judge(evidence)), key=lambda gate: int(gate[1:])
    )
    assert {row.gate for row in gates.judge(evidence)} == {f"G{number}" for number in (*range(1, 13), 14)}


def test_chance_is_no_failure(evidence):
    """Beyond the limit, but by less than two standard errors."""
    limit = next(row.limit for row in gates.judge(evidence) if row.name == "kl_mean")
    stderr = evidence.main.quality.divergence.kl_mean.stderr
    for value, status in ((limit + stderr, "warn"), (limit + 3 * stderr, "fail"), (limit, "pass")):
        assert {row.name: row.status for row in gates.judge(with_quality(evidence, "kl_mean", value))}[
            "kl_mean"
        ] == status
