import { useEffect, useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Inspection } from "../../api/types";
import { formatBytes } from "../../format";
import type { ModelRef } from "./body";

const WAIT_MS = 600;

/** What the model is, from its headers. Errors are the plan's to show. */
export function Inspect({ model }: { model: ModelRef }) {
  const asked = model.path || (model.id?.includes("/") ? model.id : "");
  const [settled, setSettled] = useState("");
  useEffect(() => {
    const timer = window.setTimeout(() => setSettled(asked), WAIT_MS);
    return () => window.clearTimeout(timer);
  }, [asked]);
  const query = useQuery(settled && !model.hub_token ? `inspect ${settled} ${model.revision}` : null, (signal) =>
    get<Inspection>("/v1/models/inspect", { path: model.path, id: model.id, revision: model.revision }, signal),
  );
  const found = query.data;
  if (!found) return null;
  const size =
    found.num_parameters >= 1e9
      ? `${(found.num_parameters / 1e9).toFixed(1)} B`
      : `${(found.num_parameters / 1e6).toFixed(1)} M`;
  return (
    <div className="notice">
      <strong>{found.architectures.join(", ") || found.model_type}</strong> · {size} parameters · {found.num_blocks}{" "}
      blocks · {formatBytes(found.size_bytes)} · {Object.keys(found.dtypes).join(", ")}
      {found.license && ` · ${found.license}`}
      {found.warnings.map((warning) => (
        <p key={warning}>⚠ {warning}</p>
      ))}
      <details>
        <summary>What the usual presets would make of it</summary>
        <table>
          <tbody>
            {found.estimates.map((each) => (
              <tr key={each.preset}>
                <td>{each.preset}</td>
                <td>
                  {Object.entries(each.size_bytes)
                    .map(([format, bytes]) => `${format} ${formatBytes(bytes)}`)
                    .join(", ") ||
                    each.refused?.detail ||
                    each.refused?.message ||
                    "cannot"}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </div>
  );
}
