import type { Job } from "../../api/types";
import { asText, differences } from "../../diff";
import { Empty, scrollable } from "../../ui/basics";

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

const at = (value: unknown, pointer: string) =>
  pointer
    .split("/")
    .slice(1)
    .map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"))
    .reduce<unknown>((inner, name) => (inner as Record<string, unknown> | null | undefined)?.[name], value);

/** Every field of the configuration in which a run differs from the baseline. */
export function ConfigDiff({ jobs, names }: { jobs: Job[]; names: Map<string, string> }) {
  const [first, ...others] = jobs;
  if (!first) return null;
  const pointers = [
    ...new Set(
      others.flatMap((job) => differences(configurationOf(first), configurationOf(job)).map((each) => each.pointer)),
    ),
  ].sort();
  return (
    <section className="card">
      <h2>Configuration</h2>
      {pointers.length === 0 ? (
        <Empty>The runs have the same model, config, calibration, formats and evaluation.</Empty>
      ) : (
        <div className="table diff" ref={scrollable}>
          <table>
            <thead>
              <tr>
                <th>Field</th>
                {jobs.map((job) => (
                  <th key={job.id}>{names.get(job.id)}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {pointers.map((pointer) => (
                <tr key={pointer}>
                  <td>
                    <code>{pointer}</code>
                  </td>
                  {jobs.map((job) => {
                    const value = asText(at(configurationOf(job), pointer));
                    const isOther = value !== asText(at(configurationOf(first), pointer));
                    return <td key={job.id}>{isOther ? <ins>≠ {value}</ins> : value}</td>;
                  })}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
