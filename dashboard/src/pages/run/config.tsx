import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Job, List, Preset } from "../../api/types";
import { asText, differences } from "../../diff";
import { formatDuration } from "../../format";
import { executionText, GATE_TEXTS, LABELS } from "../../labels";
import { Code, Empty, Facts, scrollable } from "../../ui/basics";
import { effortOfConfig, presetConfigFor } from "../new-job/body";

export function ConfigTab({ job }: { job: Job }) {
  return (
    <>
      <section className="card">
        <h2>Configuration</h2>
        <Facts
          facts={[
            ["Model", factsText(job.model)],
            ...(job.goal ? [[LABELS.goal, factsText(job.goal)] as [string, string]] : []),
            ...(job.mix ? [[LABELS.mix, factsText(job.mix)] as [string, string]] : []),
            [LABELS.exports, job.export.join(", ")],
            ["Calibration", factsText(job.calibration)],
            [LABELS.evaluation, factsText(job.evaluation) || "default"],
            [LABELS.qualityGate, GATE_TEXTS[job.gate] ?? job.gate],
            [LABELS.execution, executionText(job.file2file)],
            ["Priority", job.priority],
            [LABELS.runTimeout, timeoutText(job.limits.max_runtime_s)],
            [LABELS.queueTimeout, timeoutText(job.limits.max_pending_s)],
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
        <Code text={JSON.stringify(job.config, null, 2)} label="Resolved config as JSON" />
      </section>
    </>
  );
}

/** {num_samples: 4, tasks: []} -> "num_samples 4": empty values are left out. */
function factsText(facts: Record<string, unknown>) {
  const isSaid = (value: unknown) => value !== null && (!Array.isArray(value) || value.length > 0);
  const parts = Object.entries(facts).filter(([, value]) => isSaid(value));
  return parts.map(([name, value]) => `${name} ${valueText(value)}`).join(", ");
}

function valueText(value: unknown): string {
  if (Array.isArray(value)) return value.map(valueText).join(" + ");
  return typeof value === "object" && value !== null
    ? `(${factsText(value as Record<string, unknown>)})`
    : String(value);
}

const timeoutText = (seconds: number | null | undefined) => (seconds ? formatDuration(seconds) : "none");

function FromPreset({ job, name }: { job: Job; name: string }) {
  const presets = useQuery("presets", (signal) => get<List<Preset>>("/v1/presets", {}, signal));
  const preset = presets.data?.data.find((each) => each.name === name || each.aliases.includes(name));
  if (!preset) return null;
  const changes = differences(presetConfigFor(preset, job.config), job.config);
  const effort = effortOfConfig(preset, job.config);
  return (
    <section className="card">
      <h2>
        Changes from preset {preset.name}
        {effort && `, effort ${effort}`}
      </h2>
      {changes.length === 0 ? (
        <Empty>No changes: the config is the preset.</Empty>
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
              {changes.map(({ pointer, before, after }) => (
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
