"""Options with which ONNX Runtime computes exactly what the file says, on any processor."""

from __future__ import annotations

import onnxruntime


def session_options(*, optimized: bool = True, static_inputs: bool = False) -> onnxruntime.SessionOptions:
    """Return the options that docs/how-to/onnx.md names; ``optimized`` False leaves the graph as it was written.

    ``static_inputs``: all layers that round their inputs to integers have static scales.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # without hints at what its optimizer cannot do
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # no int8 where the file has none
    if static_inputs:  # with others its optimizer would make a graph that it cannot run
        options.add_session_config_entry("session.x64quantprecision", "1")  # no sums beyond what 16 bits hold
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    return options
