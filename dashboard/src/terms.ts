// What the terms of the pages mean, in a sentence: shown beside a label on hover. The glossary of the docs says more.

export const TERMS: Record<string, string> = {
  Perplexity: "How surprised the model is by text that calibration has not seen, per token. Lower is better.",
  "Perplexity vs. original":
    "Perplexity of the quantized model over that of the original on the same tokens. 0 % means no loss.",
  "KL divergence (mean)":
    "How far the predicted probabilities are from the original's, in nats per token. 0 is the same model.",
  "KL divergence (99th percentile)": "99 % of the tokens have a smaller KL divergence than this.",
  "Top-1 agreement": "Share of the tokens for which both models think the same next token most likely.",
  "Drafted tokens accepted": "Share of the tokens drafted by the first draft layer that the model keeps.",
  "Relative weight error": "Size of the rounding error of a layer's weight over the size of the weight.",
  "Relative output error": "Error of a layer's output on calibration text over the size of that output.",
  "SQNR (dB)": "Signal-to-quantization-noise ratio of a layer's weight, in decibels. Higher is better.",
  "Pareto-optimal": "No other run of the same model is both smaller and better.",
  "Quality gates": "Limits on the result. One that is missed is a warning, or fails the job.",
  "Worst layer": "The layer whose output changed most, relative to its size.",
  "Peak memory": "Largest memory that the processes of the job held at once.",
  "Mixed precision": "Each layer has a scheme of its own, chosen by measuring what it loses.",
  Calibration: "Text on which the job sees the inputs of each layer before it rounds the weights.",
  Execution: "Streamed: one block in memory at a time. File to file: weights are rounded without running the model.",
  "Group size": "Number of weights that share a scale.",
};
