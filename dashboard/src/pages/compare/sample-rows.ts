// What several runs of one model write, by prompt.
import type { Sample } from "../run/sample-texts";
import type { SampleRow } from "../run/samples";

/** One row for each prompt with the same answer of the original: runs may have been asked other questions. */
export function sampleRows(samplesOfRuns: Sample[][]): SampleRow[] {
  const rows = new Map<string, SampleRow>();
  samplesOfRuns.forEach((samples, run) => {
    for (const sample of samples) {
      const { prompt, original } = sample;
      const key = JSON.stringify([prompt, original]);
      const row = rows.get(key) ?? { prompt, original, samples: samplesOfRuns.map(() => undefined) };
      row.samples[run] = sample;
      rows.set(key, row);
    }
  });
  return [...rows.values()];
}
