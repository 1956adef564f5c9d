// Runs for the tests of the comparison.
import type { Job, Summary } from "../../api/types";

const SUMMARY = {
  size_after_bytes: 60,
  perplexity_ratio: 1.0063,
  perplexity_ratio_stderr: 0.001,
  kl_mean: 0.05,
  kl_stderr: null,
  worst_layer: { name: "q", relative_error: 0.09, sqnr_db: 20.9, output_error: 0.04 },
} as Summary;

/** A succeeded run with the id `job_<id>`. */
export const run = (id: string, fields: Partial<Job> = {}, figures: Partial<Summary> | null = {}): Job =>
  ({
    id: `job_${id}`,
    name: `run ${id}`,
    state: "succeeded",
    model: { path: "/models/tiny" },
    preset: "fp8",
    config: {},
    created_at: "2026-11-26T08:00:00.123456Z",
    ...fields,
    summary: figures && { ...SUMMARY, ...figures },
  }) as Job;
