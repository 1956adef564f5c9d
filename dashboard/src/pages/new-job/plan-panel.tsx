import { Problem } from "../../api/client";
import type { Plan } from "../../api/types";
import { formatBytes, formatPercent, plural } from "../../format";
import { executionText, LABELS } from "../../labels";
import { Empty, Facts, Failure, Loading } from "../../ui/basics";
import { Table } from "../../ui/table";
import type { Body } from "./body";
import { algorithmsText, calibrationText, expectedTime } from "./expected";
import { KnownQuality } from "./known-quality";
import { entriesToAdd } from "./plan-error";

// Common accelerators by their memory, in bytes.
const DEVICES: [string, number][] = [
  ["24 GB (RTX 4090, L4)", 24e9],
  ["48 GB (L40S, W7900)", 48e9],
  ["80 GB (H100, A100)", 80e9],
  ["141 GB (H200)", 141e9],
  ["192 GB (MI300X, B200)", 192e9],
];
const WEIGHTS_SHARE = 0.85; // of a device's memory for weights; the rest is for the KV cache and the runtime
const LAYERS_SHOWN = 400;

export function PlanPanel({
  body,
  plan,
  error,
  isPlanning,
}: {
  body: Body;
  plan?: Plan;
  error?: Error;
  isPlanning: boolean;
}) {
  const hasModel = !!(body.model.path || body.model.id);
  return (
    <section className="card plan" aria-label="Plan" aria-busy={isPlanning}>
      <div className="row spread">
        <h2>Plan</h2>
        {isPlanning && <span className="faint">updating…</span>}
      </div>
      {!hasModel && <Empty>Choose a model to preview the plan.</Empty>}
      {hasModel && error && <PlanError error={error} />}
      {hasModel && !plan && !error && <Loading what="Planning" />}
      {hasModel && plan && !error && (
        <>
          <KnownQuality body={body} />
          <PlanFacts plan={plan} />
        </>
      )}
    </section>
  );
}

function PlanError({ error }: { error: Error }) {
  return (
    <>
      <Failure error={error} />
      {error instanceof Problem &&
        entriesToAdd(error).map((entry) => (
          <p key={`${entry.pointer}${entry.detail}`} className="sub">
            <code>{entry.pointer ?? entry.parameter}</code> {entry.detail}
            {Array.isArray(entry.allowed) && entry.allowed.length > 0 && (
              <> Allowed: {entry.allowed.slice(0, 30).join(", ")}.</>
            )}
          </p>
        ))}
    </>
  );
}

function PlanFacts({ plan }: { plan: Plan }) {
  return (
    <>
      {plan.warnings.map((warning) => (
        <div key={warning} className="notice warn">
          ⚠ {warning}
        </div>
      ))}
      <Facts
        facts={[
          [
            "Size",
            `${formatBytes(plan.size_before_bytes)} → ${formatBytes(plan.size_after_bytes)} (${formatPercent(plan.size_after_bytes / plan.size_before_bytes - 1, 0)})`,
          ],
          [LABELS.peakMemory, formatBytes(plan.peak_memory_bytes)],
          ["Expected time", expectedTime(plan)],
          ["Algorithms", algorithmsText(plan)],
          ["Layers", `${plan.num_layers} in ${plural(plan.num_blocks, "block")}, ${plan.kept.length} not quantized`],
          ["Architecture", plan.model_type],
          [LABELS.execution, executionText(plan.executor === "file_to_file")],
          ["Calibration", calibrationText(plan)],
        ]}
      />
      <Memory parts={plan.memory_bytes} />
      <Fits plan={plan} />
      <Layers plan={plan} />
    </>
  );
}

function Memory({ parts }: { parts: Record<string, number> }) {
  return (
    <details>
      <summary>Memory breakdown</summary>
      <table>
        <tbody>
          {Object.entries(parts).map(([name, bytes]) => (
            <tr key={name}>
              <td>{name.replaceAll("_", " ")}</td>
              <td className="number">{formatBytes(bytes)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}

/** The devices that can run the job, and those that can serve its result. */
function Fits({ plan }: { plan: Plan }) {
  const mark = (fits: boolean) => (fits ? "✓ fits" : "✕ does not fit");
  return (
    <>
      <h3>Device fit</h3>
      <table>
        <thead>
          <tr>
            <th>Device</th>
            <th>This job</th>
            <th>Original</th>
            <th>Quantized</th>
          </tr>
        </thead>
        <tbody>
          {DEVICES.map(([name, bytes]) => (
            <tr key={name}>
              <td>{name}</td>
              <td>{mark(plan.peak_memory_bytes <= bytes)}</td>
              <td>{mark(plan.size_before_bytes <= bytes * WEIGHTS_SHARE)}</td>
              <td>{mark(plan.size_after_bytes <= bytes * WEIGHTS_SHARE)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p className="hint">
        Original and quantized: weights in {formatPercent(WEIGHTS_SHARE, 0).slice(1)} of the memory, the rest for the KV
        cache.
      </p>
    </>
  );
}

function Layers({ plan }: { plan: Plan }) {
  return (
    <>
      <details>
        <summary>{plural(plan.layers.length, "layer")} quantized</summary>
        <Table>
          {plan.layers.slice(0, LAYERS_SHOWN).map((layer) => (
            <tr key={layer.name}>
              <td>
                <code>{layer.name}</code>
                <div className="sub">
                  [{layer.shape.join(", ")}] {layer.scheme}, selected by {layer.chosen_by}
                </div>
              </td>
            </tr>
          ))}
        </Table>
        {plan.layers.length > LAYERS_SHOWN && <p className="hint">and {plan.layers.length - LAYERS_SHOWN} more</p>}
      </details>
      <details>
        <summary>{plural(plan.kept.length, "layer")} not quantized</summary>
        <ul>
          {plan.kept.map((each) => (
            <li key={each.name}>
              <code>{each.name}</code> {each.reason}
            </li>
          ))}
        </ul>
      </details>
    </>
  );
}
