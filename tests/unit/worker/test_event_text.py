"""What the log of a run says of the engine's events."""

from worker.event_text import EventText


def layer(name: str, block: int, error: float | None, weight_error: float = 0.1) -> dict[str, object]:
    return {"kind": "layer_quantized", "name": name, "block": block, "scheme": "w4a16", "output_error": error,
            "relative_error": weight_error}  # fmt: skip


def test_a_run_reads_as_a_story() -> None:
    events = [
        layer("q", 0, 0.01),
        {"kind": "progress", "phase": "quantize", "done": 1, "total": 2},
        layer("v", 0, 0.03),
        layer("q", 1, None, 0.2),
        {"kind": "saved", "next_block": 2, "num_blocks": 2},
        {"kind": "warning", "code": "short_text", "message": "The text is short."},
        {"kind": "candidate", "trial": {"size_bytes": 112e6, "recovery": 0.983, "algorithms": "gptq"}},
        {"kind": "gates", "results": [
            {"name": "kl_mean", "status": "fail", "value": 0.2, "limit": 0.1}, {"name": "size", "status": "pass"},
        ]},
        {"kind": "failed", "code": "gate_failed", "message": "A check failed."},
        {"kind": "completed"},
    ]  # fmt: skip
    text = EventText()
    assert [line for event in events for line in text.lines(event)] == [
        ("block 0: 2 layers to w4a16, largest error of an output 3 % (v)", "info"),
        ("block 1: 1 layer to w4a16, largest error of a weight 20 % (q)", "info"),
        ("saved: a stop continues at block 2 of 2", "info"),
        ("short_text: The text is short.", "warning"),
        ("candidate: 112.0 MB, recovery 98.30 %, gptq", "info"),
        ("check kl_mean failed: 0.2, limit 0.1", "warning"),
        ("1 of 2 checks did not fail", "info"),
        ("gate_failed: A check failed.", "error"),
        ("the result is complete and verified", "info"),
    ]


def test_whatever_an_engine_prints_is_text() -> None:
    """An engine is not trusted: a field may be missing, or of any kind."""
    text = EventText()
    odd = [
        {}, {"kind": "candidate", "trial": None}, {"kind": "gates", "results": ["x", None]}, {"kind": "warning"},
        {"kind": "layer_quantized", "output_error": "x", "relative_error": True},
        {"kind": "layer_quantized", "block": {}},
        {"kind": "phase_started"}, {"kind": "candidate", "trial": "x"}, {"kind": "gates", "results": 7},
    ]  # fmt: skip
    assert all(isinstance(line, str) for event in odd for line, _ in text.lines(event))
