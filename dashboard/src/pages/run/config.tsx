import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Job, List, Preset } from "../../api/types";
import { asText, differences } from "../../diff";
import { formatDuration } from "../../format";
import { Code, Empty, Facts, scrollable } from "../../ui/basics";

export function ConfigTab({ job }: { job: Job }) {
  return (
    <>
      <section className="card">
        <h2>Asked for</h2>
        <Facts
          facts={[
            ["Model", factsText(job.model)],
            ...(job.mix ? [["Mix", factsText(job.mix)] as [string, string]] : []),
            ["Exports", job.export.join(", ")],
            ["Calibration", factsText(job.calibration)],
            ["Measurement", factsText(job.evaluation) || "as usual"],
            ["A missed limit", GATE_TEXTS[job.gate] ?? job.gate],
            ["Way", job.file2file ? "from file to file, no model is run" : "block by block"],
            ["Priority", job.priority],
            ["Limits", limitsText(job)],
            [
              "Labels",
              Object.entries(job.labels)
                .map(([name, value]) => `${name}=${value}`)
                .join(", ") || "none",
            ],
          ]}
        />
      </section>
      {job.preset && <FromPreset job={job} name={job.preset} />}
      <section className="card">
        <h2>Resolved config</h2>
        <Code text={JSON.stringify(job.config, null, 2)} label="The resolved config" />
      </section>
    </>
  );
}

const GATE_TEXTS: Record<string, string> = { warn: "is a warning", fail: "fails the job", off: "is not looked for" };

/** {num_samples: 4, tasks: []} -> "num_samples 4": what is empty says nothing. */
function factsText(facts: Record<string, unknown>) {
  const said = Object.entries(facts).filter(([, value]) => !Array.isArray(value) || value.length > 0);
  return said.map(([name, value]) => `${name} ${String(value)}`).join(", ");
}

function limitsText(job: Job) {
  const { max_runtime_s: runtime, max_pending_s: pending } = job.limits;
  const parts = [
    runtime && `${formatDuration(runtime)} of running`,
    pending && `${formatDuration(pending)} of waiting`,
  ];
  return parts.filter(Boolean).join(", ") || "none";
}

function FromPreset({ job, name }: { job: Job; name: string }) {
  const presets = useQuery("presets", (signal) => get<List<Preset>>("/v1/presets", {}, signal));
  const preset = presets.data?.data.find((each) => each.name === name || each.aliases.includes(name));
  if (!preset) return null;
  const found = differences(preset.config, job.config);
  return (
    <section className="card">
      <h2>Compared with the preset {preset.name}</h2>
      {found.length === 0 ? (
        <Empty>No difference: it is the preset as it stands.</Empty>
      ) : (
        <div className="table diff" ref={scrollable}>
          <table>
            <thead>
              <tr>
                <th>Field</th>
                <th>Preset</th>
                <th>This run</th>
              </tr>
            </thead>
            <tbody>
              {found.map(({ pointer, before, after }) => (
                <tr key={pointer}>
                  <td>
                    <code>{pointer}</code>
                  </td>
                  <td>
                    <del>{asText(before)}</del>
                  </td>
                  <td>
                    <ins>{asText(after)}</ins>
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
