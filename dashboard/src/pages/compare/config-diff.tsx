import { useMemo } from "react";
import type { Job } from "../../api/types";
import { plural } from "../../format";
import { Empty, scrollable } from "../../ui/basics";
import { differingFields } from "./config-differences";

const MAX_NAMES = 3;

/** Every field of the configuration in which a run differs from the baseline. */
export function ConfigDiff({ jobs, base, names }: { jobs: Job[]; base: Job; names: ReadonlyMap<string, string> }) {
  const fields = useMemo(() => differingFields(base, jobs), [base, jobs]);
  return (
    <section className="card">
      <h2>Configuration</h2>
      {fields.length === 0 ? (
        <Empty>The runs have the same model, config, calibration, formats and evaluation.</Empty>
      ) : (
        <div className="table diff" ref={scrollable}>
          <table>
            <caption>The fields that differ. Runs that are not listed have the baseline's value.</caption>
            <thead>
              <tr>
                <th>Field</th>
                <th>Baseline: {names.get(base.id)}</th>
                <th>Other runs</th>
              </tr>
            </thead>
            <tbody>
              {fields.map(({ pointer, value, others }) => (
                <tr key={pointer}>
                  <td>
                    <code>{pointer}</code>
                  </td>
                  <td>{value}</td>
                  <td className="wide">
                    {others.map((other) => (
                      <div key={other.value}>
                        <ins>≠ {other.value}</ins> <span className="sub">{runsText(other.ids, names)}</span>
                      </div>
                    ))}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

/** "as fp8, as w4a16 and 12 more runs" */
function runsText(ids: string[], names: ReadonlyMap<string, string>): string {
  const shown = ids.slice(0, MAX_NAMES).map((id) => names.get(id) ?? id);
  const more = ids.length - shown.length;
  return shown.join(", ") + (more ? ` and ${plural(more, "more run")}` : "");
}
