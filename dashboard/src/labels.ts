// Labels that more than one page shows: one idea has one name.

export const LABELS = {
  evaluation: "Evaluation",
  execution: "Execution",
  exports: "Export formats",
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
  best: "Best: takes what pays",
} as const;

/** What each value of a job's `gate` does when a limit is exceeded. */
export const GATE_TEXTS: Record<string, string> = { warn: "Warn", fail: "Fail the job", off: "Off" };

export const executionText = (isFileToFile: boolean) =>
  isFileToFile ? "File to file, without running the model" : "Streamed, block by block";

/** The owner of jobs and audit entries that came from the command line of the server, without an API key. */
export const OPERATOR = "operator";

/** The text columns that are tried if none is given. */
export const COLUMN_PLACEHOLDER = "text or messages";
