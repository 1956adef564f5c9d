// What the terms of the pages mean, in a sentence: shown beside a label on hover. The glossary of the docs says more.

export const TERMS: Record<string, string> = {
  Perplexity: "How surprised the model is by text not used for calibration, per token. Lower is better.",
  "Perplexity vs. original":
    "Perplexity of the quantized model relative to the original on the same tokens. 0 % means no loss.",
  "KL divergence (mean)":
    "How far the predicted probabilities are from the original's, in nats per token. 0 means identical predictions.",
  "KL divergence (99th percentile)": "99 % of the tokens have a smaller KL divergence than this.",
  "Top-1 agreement": "Share of tokens for which both models predict the same most likely next token.",
  "Drafted tokens accepted": "Share of the tokens drafted by the first draft layer that the model accepts.",
  "Relative weight error": "Norm of the rounding error of a layer's weight, divided by the norm of the weight.",
  "Relative output error":
    "Norm of the error of a layer's output on calibration text, divided by the norm of the output.",
  "SQNR (dB)": "Signal-to-quantization-noise ratio of a layer's weight, in decibels. Higher is better.",
  "Against the baseline":
    "Whether the KL divergence is larger or smaller than the baseline's on the same tokens, with its 95 % interval.",
  "Pareto-optimal": "No other run of the same model is both smaller and better.",
  Checks: "Limits for the result. A missed limit is a warning or fails the job.",
  "Worst layer": "The layer whose output changed most, relative to its norm.",
  "Peak memory": "Maximum memory used by all processes of the job at once.",
  "Mixed precision": "Each layer has its own scheme, chosen by measuring its loss.",
  Calibration: "Text used to observe the inputs of each layer before its weights are rounded.",
  Execution: "Streamed: one block in memory at a time. File to file: weights are rounded without running the model.",
  "Group size": "Number of weights that share a scale.",
};
