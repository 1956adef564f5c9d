// The fields of the configuration in which runs differ from the baseline.
import type { Job } from "../../api/types";
import { asText, differences } from "../../diff";

export interface DifferingField {
  /** For example /config/global_quant_config/weight/dtype. */
  pointer: string;
  /** The baseline's value. */
  value: string;
  /** Every other value, with the ids of its runs, that of most runs first. */
  others: { value: string; ids: string[] }[];
}

const configurationOf = (job: Job) => ({
  model: job.model,
  config: job.config,
  calibration: job.calibration,
  export: job.export,
  evaluation: job.evaluation,
  gate: job.gate,
  file2file: job.file2file,
  shard_blocks: job.shard_blocks,
});

export function differingFields(base: Job, jobs: Job[]): DifferingField[] {
  const before = configurationOf(base);
  const fields = new Map<string, { value: string; others: Map<string, string[]> }>();
  for (const job of jobs) {
    for (const each of differences(before, configurationOf(job))) {
      const field = fields.get(each.pointer) ?? { value: asText(each.before), others: new Map() };
      const value = asText(each.after);
      field.others.set(value, [...(field.others.get(value) ?? []), job.id]);
      fields.set(each.pointer, field);
    }
  }
  return [...fields]
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([pointer, { value, others }]) => ({
      pointer,
      value,
      others: [...others].map(([other, ids]) => ({ value: other, ids })).sort((a, b) => b.ids.length - a.ids.length),
    }));
}
