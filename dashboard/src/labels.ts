// Labels that more than one page shows: one idea has one name.
import type { Runtime } from "./api/types";

export const LABELS = {
  evaluation: "Evaluation",
  execution: "Execution",
  exports: "Export formats",
  goal: "Goal",
  klMean: "KL divergence (mean)",
  mix: "Mixed precision",
  peakMemory: "Peak memory",
  permissions: "Permissions",
  qualityGate: "Quality gate",
  queueTimeout: "Queue timeout",
  runTimeout: "Run timeout",
} as const;

/** What each value of a job's `effort` means. */
export const EFFORT_TEXTS = {
  fast: "Fast: rounds to nearest, no data",
  balanced: "Balanced (default)",
  best: "Best: every algorithm that helps",
} as const;

/** The programs that a result can be meant for. */
export const RUNTIME_TEXTS: Record<Runtime, string> = {
  vllm: "vLLM",
  transformers: "Transformers",
  llama_cpp: "llama.cpp",
  onnx: "ONNX Runtime",
};

/** What a goal can ask for, by the value of its `min_recovery`; the empty one is the service's default. */
export const RECOVERY_TEXTS: Record<string, string> = {
  "": "98 % (default)",
  "0.95": "95 %: smaller",
  "0.99": "99 %",
  "0.995": "99.5 %",
  best: "The best that fits",
};

/** What each value of a job's `gate` does when a limit is exceeded. */
export const GATE_TEXTS: Record<string, string> = { warn: "Warn", fail: "Fail the job", off: "Off" };

export const executionText = (isFileToFile: boolean) =>
  isFileToFile ? "File to file, without running the model" : "Streamed, block by block";

/** The owner of jobs and audit entries that came from the command line of the server, without an API key. */
export const OPERATOR = "operator";

/** The text columns that are tried if none is given. */
export const COLUMN_PLACEHOLDER = "text or messages";
