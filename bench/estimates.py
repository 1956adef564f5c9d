"""``python -m bench.estimates MODEL``: how far a goal's estimates differ from seed to seed, and what they cost.

Before it tries candidates, a goal estimates what every scheme costs in every unit of layers. For each number and length
of windows the estimates are made with several seeds, which draw the windows of the built-in text and the tokens whose
gradients are taken.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance

from quantcore.config.goal import Goal
from quantcore.config.quantization import CalibrationConfig
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.mixed_precision.command import read_texts
from quantcore.engine.mixed_precision.sensitivity import Losses, Sensitivity
from quantcore.events import silence
from quantcore.importing.model import Model, read_model
from quantcore.plan.fitting import fit
from quantcore.plan.runtimes import SUPPORTED_SCHEMES


def estimate(model: Model, goal: Goal, calibration: CalibrationConfig) -> Losses:
    """Return the divergence of each unit of layers in each scheme of the goal's runtime and device."""
    plans = fit(goal, model.headers, calibration, (SUPPORTED_SCHEMES[goal.runtime].export,)).plans
    windows_NT, _ = read_texts(model.folder, calibration)
    with tempfile.TemporaryDirectory() as scratch:
        return Sensitivity(open_model(model), windows_NT, plans, Path(scratch), silence).losses(calibration.seed)


def noise(estimates: Sequence[Losses]) -> float:
    """Return the standard deviation of the logarithm of an estimate from seed to seed, over all units and schemes."""
    first = estimates[0]
    spreads = [
        variance(math.log(losses[unit][scheme]) for losses in estimates) for unit in first for scheme in first[unit]
    ]
    return math.sqrt(fmean(spreads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a float model")
    parser.add_argument("--runtime", choices=list(SUPPORTED_SCHEMES), default="vllm")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--windows", nargs="+", default=["64x128", "32x512"], help="number x tokens")
    parser.add_argument("--num_seeds", type=int, default=4)
    options = parser.parse_args()
    model, goal = read_model(options.model), Goal(runtime=options.runtime, device=options.device)
    print("| windows | standard deviation of the log | CPU seconds |\n|---|---:|---:|")
    for windows in options.windows:
        num_samples, seq_len = map(int, windows.split("x"))
        began, estimates = time.process_time(), []
        for seed in range(options.num_seeds):
            calibration = CalibrationConfig(num_samples=num_samples, seq_len=seq_len, seed=seed)
            estimates.append(estimate(model, goal, calibration))
        seconds = (time.process_time() - began) / options.num_seeds
        print(f"| {num_samples} x {seq_len} | {noise(estimates):.2f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
