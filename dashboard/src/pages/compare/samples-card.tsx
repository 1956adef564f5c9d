import { useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Job, Report } from "../../api/types";
import { plural } from "../../format";
import { Empty, Pending } from "../../ui/basics";
import { SampleTable } from "../run/samples";
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
          Text is marked from its first difference from the original's answer. The runs are those with “Layers” ticked
          in the table above.
        </p>
        {isOpen && <Pending query={query} />}
        {query.data && rows.length === 0 && <Empty>These runs have no samples: no prompts were sampled.</Empty>}
        {rows.length > 0 && <SampleTable columns={jobs.map(({ id }) => ({ id, title: names.get(id) }))} rows={rows} />}
      </details>
    </section>
  );
}

const readReport = (id: string, signal: AbortSignal) => get<Report>(`/v1/jobs/${id}/artifacts/report.json`, {}, signal);
