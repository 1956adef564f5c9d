import { type Job, type Measured, modelOf, schemeOf, summaryOf } from "../../api/types";
import { scrollable } from "../../ui/basics";
import { changeOf, halfInterval, ROWS, type Row } from "./change";

type Ratios = ReadonlyMap<string, Measured>;

/** Each metric and its change from the baseline, marked by sign and word, not by colour alone. */
export function ResultsTable({ jobs, names, ratios }: { jobs: Job[]; names: Map<string, string>; ratios: Ratios }) {
  const [first] = jobs;
  const shown = ROWS.filter((row) => jobs.some((job) => valueIn(row, job, ratios) != null));
  const isMixed = first && jobs.some((job) => modelOf(job) !== modelOf(first));
  return (
    <div className="table results" ref={scrollable}>
      <table>
        <caption>
          Changes are from {first && names.get(first.id)}; ± is half a 95 % interval.
          {isMixed && " Runs of another model are compared by their perplexity against their own original alone."}
        </caption>
        <thead>
          <tr>
            <th>Metric</th>
            {jobs.map((job) => (
              <th key={job.id} className="number">
                {names.get(job.id)}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          <tr>
            <th scope="row">Preset</th>
            {jobs.map((job) => (
              <td key={job.id} className="number">
                {schemeOf(job)}
              </td>
            ))}
          </tr>
          {shown.map((row) => (
            <tr key={row.text}>
              <th scope="row">{row.text}</th>
              {first && jobs.map((job) => <Cell key={job.id} row={row} job={job} base={first} ratios={ratios} />)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function valueIn(row: Row, job: Job, ratios: Ratios) {
  const summary = summaryOf(job);
  return summary && row.value(summary, ratios.get(job.id));
}

function stderrOf(row: Row, job: Job, ratios: Ratios): number {
  const summary = summaryOf(job);
  return (summary && row.stderr?.(summary, ratios.get(job.id))) || 0;
}

function Cell({ row, job, base, ratios }: { row: Row; job: Job; base: Job; ratios: Ratios }) {
  const value = valueIn(row, job, ratios);
  const baseValue = valueIn(row, base, ratios);
  if (value == null) return <td className="number">–</td>;
  const stderr = stderrOf(row, job, ratios);
  const isComparable = job !== base && baseValue != null && (row.ofAnyModel || modelOf(job) === modelOf(base));
  const change = isComparable ? changeOf(row, value, baseValue, [stderr, stderrOf(row, base, ratios)]) : null;
  return (
    <td className="number">
      {row.format(value)}
      {stderr > 0 && ` ± ${row.format(halfInterval(stderr)).replace(/^[+±−]/, "")}`}
      {change && <div className={`sub ${change.tone}`}>{change.text}</div>}
    </td>
  );
}
