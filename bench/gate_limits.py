"""The quality loss of the schemes on one model: measurements behind the limits in
``quantcore/engine/verification/gates.py``.

usage: python -m bench.gate_limits MODEL_DIR [PRESET ...]    one JSON line per preset
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from quantcore.config import presets
from quantcore.config.task import EvaluationConfig, Task
from quantcore.engine.pipeline.job import run
from quantcore.engine.runtime.devices import limit_threads
from quantcore.errors import QuantError
from quantcore.events import silence
from quantcore.export import formats_for

PRESETS = (
    "int8_weight_only int8_dynamic int8_static int8 fp8 fp8_dynamic mxfp8 gguf_q8_0 gguf_q6_k mxfp6_e3m2 gguf_q5_1"
    " uint4_wo_32 w4a16 uint4_wo_128 w4a16_sym nf4 gguf_q4_k gguf_q4_0 mxfp4_weight_only nvfp4_weight_only"
    " uint4_wo_per_channel int4_wo_per_channel nvfp4 mxfp4 int4_fp8 int4_wa_64"
).split()


def measure(model_dir: Path, preset: str) -> dict[str, object]:
    config = presets.resolve(preset)
    with tempfile.TemporaryDirectory() as scratch:
        task = Task(
            model_dir=model_dir, output_dir=Path(scratch) / "out", config=config, export=formats_for(config)[:1],
            evaluation=EvaluationConfig(num_prompts=0),
        )  # fmt: skip
        report = run(task, silence)
    assert report is not None and report.quality is not None
    divergence = report.quality.divergence
    return {
        "preset": preset,
        "ratio": report.quality.ratio.to_dict(),
        "kl_mean": divergence.kl_mean.to_dict(),
        "kl_p99": divergence.kl_p99,
        "top1_agreement": divergence.top1_agreement.to_dict(),
        "logit_error": divergence.logit_error,
        "worst_sqnr_db": min(layer.sqnr_db for layer in report.layers),
    }


if __name__ == "__main__":
    limit_threads()
    for name in sys.argv[2:] or PRESETS:
        try:
            print(json.dumps(measure(Path(sys.argv[1]), name)), flush=True)
        except QuantError as error:
            print(json.dumps({"preset": name, "error": error.code}), flush=True)
