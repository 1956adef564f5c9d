// Names of what more than one page shows: one idea has one name.

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
  top1Agreement: "Top-1 agreement",
} as const;

/** What each value of a job's `gate` does when a limit is exceeded. */
export const GATE_TEXTS: Record<string, string> = { warn: "Warn", fail: "Fail the job", off: "Off" };

export const executionText = (isFileToFile: boolean) =>
  isFileToFile ? "File to file, without running the model" : "Streamed, block by block";

/** The owner of what was done with no API key: on the server's command line. */
export const OPERATOR = "operator";

/** A text column that is found by its name unless one is given. */
export const COLUMN_PLACEHOLDER = "text or messages";
