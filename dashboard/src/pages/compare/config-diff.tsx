import type { Job } from "../../api/types";
import { asText, differences } from "../../diff";
import { Empty, scrollable } from "../../ui/basics";

const askedFor = (job: Job) => ({
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

/** Every field in which some run was asked for something else than the first one. */
export function ConfigDiff({ jobs, names }: { jobs: Job[]; names: Map<string, string> }) {
  const [first, ...others] = jobs;
  if (!first) return null;
  const pointers = [
    ...new Set(others.flatMap((job) => differences(askedFor(first), askedFor(job)).map((each) => each.pointer))),
  ].sort();
  return (
    <section className="card">
      <h2>What was asked for</h2>
      {pointers.length === 0 ? (
        <Empty>The same: model, config, calibration, formats and measurement.</Empty>
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
                    const value = asText(at(askedFor(job), pointer));
                    const isOther = value !== asText(at(askedFor(first), pointer));
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
