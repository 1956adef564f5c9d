import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Inspection } from "../../api/types";
import { formatBytes } from "../../format";
import { useSettled } from "../../settled";
import type { ModelRef } from "./body";

const WAIT_MS = 600;

/** Facts about the model, read from its headers. The plan shows errors. */
export function Inspect({ model }: { model: ModelRef }) {
  const name = model.path || (model.id?.includes("/") ? model.id : "");
  const settled = useSettled(name, WAIT_MS);
  const query = useQuery(settled && !model.hub_token ? `inspect ${settled} ${model.revision}` : null, (signal) =>
    get<Inspection>("/v1/models/inspect", { path: model.path, id: model.id, revision: model.revision }, signal),
  );
  const inspection = query.data;
  if (!inspection) return null;
  const size =
    inspection.num_parameters >= 1e9
      ? `${(inspection.num_parameters / 1e9).toFixed(1)} B`
      : `${(inspection.num_parameters / 1e6).toFixed(1)} M`;
  return (
    <div className="notice">
      <strong>{inspection.architectures.join(", ") || inspection.model_type}</strong> · {size} parameters ·{" "}
      {inspection.num_blocks} blocks · {formatBytes(inspection.size_bytes)} ·{" "}
      {Object.keys(inspection.dtypes).join(", ")}
      {inspection.license && ` · ${inspection.license}`}
      {inspection.warnings.map((warning) => (
        <p key={warning}>⚠ {warning}</p>
      ))}
      <details>
        <summary>Estimated size by preset</summary>
        <table>
          <tbody>
            {inspection.estimates.map((each) => (
              <tr key={each.preset}>
                <td>{each.preset}</td>
                <td>
                  {Object.entries(each.size_bytes)
                    .map(([format, bytes]) => `${format} ${formatBytes(bytes)}`)
                    .join(", ") ||
                    each.refused?.detail ||
                    each.refused?.message ||
                    "not supported"}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </div>
  );
}
