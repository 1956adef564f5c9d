import type { Gate, Level } from "../../api/types";
import { formatNumber } from "../../format";
import { Table } from "../../ui/table";

const LOOKS = {
  pass: ["", "✓ pass"],
  warn: ["warn", "⚠ warn"],
  fail: ["bad", "✕ fail"],
  skipped: ["faint", "– skipped"],
} as const;

/** "1 fail, 10 pass, 7 skipped" */
export function checksText(gates: Gate[]) {
  const statuses = ["fail", "warn", "pass", "skipped"] as const;
  const counts = statuses.map((status) => [gates.filter((gate) => gate.status === status).length, status] as const);
  return counts
    .filter(([number]) => number > 0)
    .map((each) => each.join(" "))
    .join(", ");
}

/** The checks: those that were missed, with what follows from them, and the others folded. */
export function Checks({ gates, level }: { gates: Gate[]; level?: Level }) {
  const missed = gates.filter(({ status }) => status === "fail" || status === "warn");
  const others = gates.filter(({ status }) => status === "pass" || status === "skipped");
  const changesVerdict = level === "faithful" || level === "good";
  return (
    <>
      <h3>Checks: {checksText(gates)}</h3>
      {missed.length > 0 && (
        <>
          <p className="hint">
            {changesVerdict && missed.some(({ status }) => status === "fail")
              ? "A failed check changed the verdict: look at it before you ship the result. A warning is a footnote."
              : "Footnotes: the verdict does not depend on these."}
          </p>
          <CheckTable gates={missed} />
        </>
      )}
      {others.length > 0 && (
        <details>
          <summary>{missed.length ? "The other checks" : "All checks passed"}</summary>
          <CheckTable gates={others} />
        </details>
      )}
    </>
  );
}

export function CheckTable({ gates }: { gates: Gate[] }) {
  return (
    <Table
      head={
        <>
          <th>Result</th>
          <th>Check</th>
          <th className="number">Value</th>
          <th className="number">Limit</th>
        </>
      }
    >
      {gates.map((gate) => {
        const [tone, text] = LOOKS[gate.status];
        return (
          <tr key={gate.name}>
            <td className={`nowrap ${tone}`}>{text}</td>
            <td>
              {gate.gate} {gate.name.replaceAll("_", " ")}
              <div className="sub">{gate.detail}</div>
            </td>
            <td className="number">{formatNumber(gate.value)}</td>
            <td className="number">{formatNumber(gate.limit)}</td>
          </tr>
        );
      })}
    </Table>
  );
}
