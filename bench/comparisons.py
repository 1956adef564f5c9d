"""``make bench-comparisons``: how often a comparison finds a real change, and how often a false one.

``bitfoundry compare NEW OLD --against ORIGINAL`` says whether a result is worse. Here the results of one recipe differ
by the seed of their calibration alone: what is found between two of them is a false alarm. Then all errors of the
weights of each are enlarged, so that its divergence grows by about ``--change``, and it is compared with the others.
The same is done for groups: every half of the results against the other half.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import combinations, permutations
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from safetensors.torch import load_file, save_file

from bench.engines.results import FOLDER
from quantcore.config import presets
from quantcore.config.quantization import CalibrationConfig
from quantcore.config.recipes import with_recipe
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.evaluation.divergence import Measured, measure
from quantcore.engine.evaluation.inputs import held_out_text
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.paired import compare_measured
from quantcore.engine.evaluation.text import EvaluationText
from quantcore.engine.pipeline.job import run
from quantcore.engine.runtime.devices import limit_threads
from quantcore.events import silence
from quantcore.importing.model import read_model
from quantcore.report.paired import judge

TOLERANCES = (0.0, 0.01, 0.02, 0.03, 0.05)


@dataclass(frozen=True)
class Results:
    """The measurements on one text: those of each seed's result, and those of its copy with larger errors."""

    text: EvaluationText
    plain: list[Measured]
    worse: list[Measured]

    def row(self) -> dict[str, Any]:
        """Return the spread between seeds, and the shares of pairs in which a change is found, by tolerance."""
        pairs = [self._compared([new], [old]) for new, old in combinations(self.plain, 2)]
        numbers = permutations(range(len(self.plain)), 2)
        enlarged = [self._compared([self.worse[new]], [self.plain[old]]) for new, old in numbers]
        alarms, found = {}, {}
        for tolerance in TOLERANCES:
            verdicts = [judge(pair["kl_change"], tolerance) for pair in pairs]
            alarms[tolerance] = mean(verdict != "no difference found" for verdict in verdicts)
            found[tolerance] = mean(judge(pair["kl_change"], tolerance) == "worse" for pair in enlarged)
        return {
            "tokens": int(self.text.scored_NP.sum()), "results": len(self.plain),
            "kl": mean(map(kl_of, self.plain)), "seed_deviation": stdev(math.log(kl_of(one)) for one in self.plain),
            "enlarged_by": mean(kl_of(new) / kl_of(old) - 1 for new, old in zip(self.worse, self.plain, strict=True)),
            "smallest_kl_change": mean(pair["smallest_kl_change"] for pair in pairs),
            "false_alarms": alarms, "found": found, "halves": self._halves(),
        }  # fmt: skip

    def _halves(self) -> dict[str, float]:
        """Compare each half of the results with the other one; the shares in which a change is found."""
        numbers = frozenset(range(len(self.plain)))
        plain, enlarged = [], []
        for half in combinations(sorted(numbers), len(numbers) // 2):
            old = [self.plain[number] for number in numbers - {*half}]
            plain.append(self._compared([self.plain[number] for number in half], old))
            enlarged.append(self._compared([self.worse[number] for number in half], old))
        return {
            "results_a_side": len(numbers) // 2,
            "false_alarms": mean(each["verdict"] != "no difference found" for each in plain),
            "found": mean(each["verdict"] == "worse" for each in enlarged),
            "smallest_kl_change": mean(each["smallest_kl_change"] for each in plain),
        }

    def _compared(self, new: list[Measured], old: list[Measured]) -> dict[str, Any]:
        return compare_measured(new, old, self.text.scored_NP, strata_N=self.text.strata_N)


def kl_of(measured: Measured) -> float:
    assert measured.distances_NP4 is not None
    return measured.distances_NP4[..., 0].mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-comparisons", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="folders, such as those of bench.trained_models")
    parser.add_argument("--text", type=Path, help="measure on this text as well as on the built-in one")
    parser.add_argument("--preset", default="w4a16")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64_000)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--change", type=float, default=0.05)
    options = parser.parse_args()
    limit_threads()
    rows: list[dict[str, Any]] = []
    file = FOLDER / f"{date.today().isoformat()}-comparisons.json"
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="bf-comparisons-") as scratch:
            folders = list(results_of(model, Path(scratch), options))
            for source in (None, options.text) if options.text else (None,):
                evaluation = EvaluationConfig(
                    source=None if source is None else str(source), seq_len=options.seq_len,
                    num_windows=options.tokens // options.seq_len,
                )  # fmt: skip
                text = held_out_text(model, evaluation, fewer=True)
                found = Results(text, *measured(model, folders, text)).row()
                named = {"model": model.name, "preset": options.preset, "text": source.name if source else "built-in"}
                rows.append(named | found)
                print(json.dumps(rows[-1]), flush=True)
                file.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


def results_of(model: Path, scratch: Path, options: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Quantize a model with each seed; yield the folder of the result in floats, and of one with larger errors."""
    config = with_recipe(presets.resolve(options.preset), None, preset=options.preset)
    for seed in range(options.seeds):
        task = Task(
            model_dir=model, output_dir=scratch / f"{seed}", config=config, export=("fake_quantized",),
            calibration=CalibrationConfig(num_samples=32, seq_len=512, seed=seed),
            evaluation=EvaluationConfig(num_windows=0), gate="off",
        )  # fmt: skip
        run(task, silence)
        yield scratch / f"{seed}", enlarged(model, scratch / f"{seed}", scratch / f"{seed}-worse", options.change)


def enlarged(model: Path, result: Path, folder: Path, change: float) -> Path:
    """Copy a result with all errors of its weights times sqrt(1 + change): to second order, KL is their square."""
    shutil.copytree(result, folder)
    exact = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in folder.glob("*.safetensors"):
        tensors = {
            name: (exact[name].float() + math.sqrt(1 + change) * (tensor.float() - exact[name].float())).to(tensor)
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    return folder


def measured(
    model: Path, folders: list[tuple[Path, Path]], text: EvaluationText
) -> tuple[list[Measured], list[Measured]]:
    """Measure all results and those with larger errors against the original."""
    original = open_model(read_model(model))
    states = original.last_states(text, lambda done: None)
    with original.vocabulary(states[0]) as vocabulary:
        plain, worse = ([], [])
        for pair in folders:
            for folder, found in zip(pair, (plain, worse), strict=True):
                result = open_model(read_model(folder))
                own = result.last_states(text, lambda done: None)
                with result.vocabulary(own[0]) as own_vocabulary:
                    found.append(measure(own_vocabulary, own, text, (vocabulary, states)))
    return plain, worse


if __name__ == "__main__":
    main()
