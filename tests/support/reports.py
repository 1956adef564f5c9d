"""A whole report as JSON data, as ``report.json`` holds it."""

from __future__ import annotations

from typing import Any


def measure(value: float, stderr: float | None = 0.1) -> dict[str, float | None]:
    return {"value": value, "stderr": stderr}


def perplexities(value: float) -> dict[str, Any]:
    names = ("token_perplexity", "word_perplexity", "byte_perplexity")
    return {**{name: measure(value) for name in names}, "bits_per_byte": 1.5}


def gate(status: str) -> dict[str, Any]:
    return {"gate": "G8", "name": "kl_mean", "status": status, "value": 0.5, "limit": 0, "detail": "± 0.01"}


def behaviour(*, is_worse: bool = True) -> dict[str, Any]:
    """Return what ``behaviour`` of a report holds: answers that no longer end, and loops that may be chance."""
    change = {"value": 0.1, "low": -0.1, "high": 0.3}
    endless = {
        "fault": "endless", "title": "do not end", "num_prompts": 12, "original": 0.1, "result": 0.75, "num_worse": 9,
        "num_better": 0, "change": change, "chance": 0.002, "is_worse": is_worse, "num_needed": None,
    }  # fmt: skip
    loop = {
        **endless, "fault": "loop", "title": "repeat themselves", "num_worse": 2, "num_better": 1, "is_worse": False,
        "num_needed": 387,
    }  # fmt: skip
    return {
        "num_prompts": 12, "num_answers": [3, 3], "max_tokens": 256, "faults": [endless, loop],
        "length": {"ratio": {"value": 1.02, "low": 0.9, "high": 1.1}, "is_off": False, "num_needed": None},
        "changed_finals": change, "lost_ends": ["<|im_end|>"] if is_worse else [], "num_rendered_otherwise": 0,
        "left_out": {"tools": "the template never reads tools"},
    }  # fmt: skip


def kv_cache(dtype: str, *, level: str = "faithful", kl: float = 0.001, spared: int = 0) -> dict[str, Any]:
    """Return what ``kv_caches`` of a report holds for a dtype of llama.cpp."""
    quality = report(kl=kl)["quality"]
    last = {"first": 257, "last": 511, "num_tokens": 3000, "kl_mean": measure(3 * kl), "top1_agreement": measure(0.9)}
    return {
        "dtype": dtype, "program": "llama.cpp", "option": f"--cache-type-k {dtype} --cache-type-v {dtype}",
        "bytes_per_token": 408, "bytes_per_token_of_16_bits": 768, "num_blocks": 3, "num_blocks_spared": spared,
        "num_blocks_without": 0, "quality": {**quality, "by_position": [last]}, "level": level,
    }  # fmt: skip


def layer(name: str, scheme: str) -> dict[str, Any]:
    return {
        "kind": "layer_quantized", "name": name, "block": 0, "relative_error": 0.01, "sqnr_db": 40.0, "scheme": scheme,
        "output_error": None, "rounding_error": None, "num_tokens": None,
    }  # fmt: skip


def windows(kl: float, *, num: int = 12) -> dict[str, Any]:
    """Return what ``quality.by_window`` holds: windows of 500 tokens, with noise of each result."""
    each = [500 * kl * (1 + 0.5 * (number % 4) + 0.01 * ((number + round(50 * kl)) % 3)) for number in range(num)]
    return {
        "num_tokens": [500] * num, "losses": [1500 + value for value in each], "kl": each,
        "top1_agreements": [480.0 - number % 5 for number in range(num)],
    }  # fmt: skip


def report(*, size: int = 19000, kl: float = 0.1, model: str = "sha256:a", text: str = "t") -> dict[str, Any]:
    """Return a report of schema version 2 as the first release wrote it: fields that came later are missing."""
    return {
        "schema_version": 2,
        "summary": {
            "size_before_bytes": 38000, "size_after_bytes": size, "perplexity_before": 20.0,
            "perplexity_after": 20 + kl, "perplexity_ratio": 1 + kl / 20, "kl_mean": kl,
            "worst_layer": {"name": "b", "relative_error": 0.01, "sqnr_db": 40.0}, "num_layers_quantized": 2,
            "num_layers_kept": 0, "quantize_s": 1.0, "total_s": 2, "peak_memory_bytes": 1000,
            "planned_peak_memory_bytes": 1000, "gate": "warn", "gates": [gate("fail"), gate("pass")],
            "exports": {"quark": {"path": ".", "bytes": size, "load": "LLM('.')"}},
        },
        "model": {"path": "/models/tiny", "model_type": "llama"},
        "config": {"global_quant_config": {}},
        "calibration": {"num_samples": 8},
        "evaluation": {"num_windows": 12},
        "proof": {"quark": {"num_tensors_equal": 9, "max_logit_difference": 0, "perplexity": 20 + kl}},
        "quality": {
            "num_windows": 12, "seq_len": 512, "num_tokens": 6000, "after": perplexities(20 + kl),
            "before": perplexities(20.0), "ratio": measure(1 + kl / 20),
            "divergence": {
                "kl_mean": measure(kl, 0.01), "kl_p99": 0.5, "top1_agreement": measure(0.9), "logit_error": 0.1
            },
        },
        "samples": None,
        "harness": None,
        "layers": [layer("a", "int8"), layer("b", "fp8")],
        "edges": [],
        "kept": [],
        "warnings": [],
        "provenance": {
            "model": model, "calibration_sha256": "c", "held_out_sha256": text, "config_sha256": "f", "seed": "0"
        },
        "environment": {"quantcore": "0.1"},
    }  # fmt: skip
