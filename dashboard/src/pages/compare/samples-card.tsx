import { useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Job, Report } from "../../api/types";
import { plural } from "../../format";
import { Empty, Pending, scrollable } from "../../ui/basics";
import { Marked } from "../run/samples";
import { sampleRows } from "./sample-rows";

/** What runs of one model write to the same prompts. Their reports are read when the card is opened. */
export function SamplesCard({ jobs, names }: { jobs: Job[]; names: ReadonlyMap<string, string> }) {
  const [isOpen, setIsOpen] = useState(false);
  const query = useQuery(isOpen ? `samples of ${jobs.map(({ id }) => id).join()}` : null, (signal) =>
    Promise.all(jobs.map(async ({ id }) => (await readReport(id, signal)).samples ?? [])),
  );
  const rows = sampleRows(query.data ?? []);
  return (
    <section className="card" aria-label="Sample outputs">
      <h2>Sample outputs</h2>
      <details open={isOpen} onToggle={(event) => setIsOpen(event.currentTarget.open)}>
        <summary>Answers of the original and of {plural(jobs.length, "run")} of the baseline's model</summary>
        <p className="hint">
          Marked is what differs from the original's answer, from the first difference on. The runs are those with
          “Layers” ticked in the table above.
        </p>
        {isOpen && <Pending query={query} />}
        {query.data && rows.length === 0 && <Empty>These runs have no samples: their evaluation asked nothing.</Empty>}
        {rows.length > 0 && (
          <div className="table" ref={scrollable}>
            <table className="samples">
              <thead>
                <tr>
                  <th>Prompt</th>
                  <th>Original model</th>
                  {jobs.map(({ id }) => (
                    <th key={id}>{names.get(id)}</th>
                  ))}
                </tr>
              </thead>
              <tbody>
                {rows.map((row) => (
                  <tr key={JSON.stringify([row.prompt, row.original])}>
                    <td>{row.prompt}</td>
                    <td className="answer">{row.original}</td>
                    {row.samples.map((sample, run) => (
                      <td key={jobs[run]?.id} className="answer">
                        {sample ? <Marked sample={sample} /> : "–"}
                      </td>
                    ))}
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
      </details>
    </section>
  );
}

const readReport = (id: string, signal: AbortSignal) => get<Report>(`/v1/jobs/${id}/artifacts/report.json`, {}, signal);
