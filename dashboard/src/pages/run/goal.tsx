import { useMemo, useState } from "react";
import type { GoalResult, GoalTrial, Job } from "../../api/types";
import type { Axis } from "../../charts/scale";
import { Scatter } from "../../charts/scatter";
import { formatBytes, formatShare } from "../../format";
import { LABELS } from "../../labels";
import { goalText, layersText } from "../../names";
import { Empty } from "../../ui/basics";
import { Table } from "../../ui/table";
import { VerdictLevel } from "../job-progress";
import { measuredText } from "./verdict";

const SIZES: Axis = { format: formatBytes };
const SHARES: Axis = { format: (share) => formatShare(share, 1) };

/** Why a goal's result was chosen, the candidates that were measured, and what to expect of other sizes. */
export function GoalCard({ goal }: { goal: GoalResult }) {
  const [picked, setPicked] = useState<string | null>(null);
  const series = useMemo(() => seriesOf(goal), [goal]);
  const wanted = goal.asked.min_recovery;
  const limit = typeof wanted === "number" ? { y: wanted, text: `${formatShare(wanted, 1)} requested` } : undefined;
  return (
    <section className="card" aria-label={LABELS.goal}>
      <h2>{LABELS.goal}</h2>
      <p className={goal.is_met ? undefined : "error"}>
        {goal.is_met ? "✓ met" : "✕ missed"}: {goal.why}.
      </p>
      <Scatter
        label="Size and recovery of the candidates; higher is better"
        series={series}
        xLabel="size"
        yLabel="recovery"
        xAxis={SIZES}
        yAxis={SHARES}
        radius={5}
        limit={limit}
        onPick={setPicked}
        picked={picked}
      />
      <Candidates trials={goal.trials} />
      <ul>
        {goal.advice.map((line) => (
          <li key={line}>{line}</li>
        ))}
      </ul>
    </section>
  );
}

/** The goal of a run that has no result yet, with the candidates that it has measured so far. */
export function GoalSoFar({ goal, trials }: { goal: NonNullable<Job["goal"]>; trials: GoalTrial[] }) {
  return (
    <section className="card" aria-label={LABELS.goal}>
      <h2>{LABELS.goal}</h2>
      <p>{goalText(goal)}</p>
      {trials.length > 0 ? <Candidates trials={trials} /> : <Empty>No candidate was measured yet.</Empty>}
    </section>
  );
}

function seriesOf(goal: GoalResult) {
  const expected = goal.frontier.map(({ size_bytes: x, recovery: y }) => ({
    x,
    y,
    name: `${formatBytes(x)}, expected`,
  }));
  const measured = goal.trials.map(({ size_bytes: x, recovery: y }, index) => ({
    x,
    y,
    name: `${formatBytes(x)}, candidate ${index + 1}`,
  }));
  return [
    { name: "measured", look: 0, points: measured },
    { name: "expected", look: 1, points: expected },
  ];
}

function Candidates({ trials }: { trials: GoalResult["trials"] }) {
  return (
    <Table
      caption="Recovery is the lower end of the 95 % interval, which is in brackets for the divergence."
      head={
        <>
          <th>Candidate</th>
          <th className="number">Size</th>
          <th>Layers</th>
          <th>Algorithms</th>
          <th className="number">{LABELS.klMean}</th>
          <th className="number">Recovery</th>
          <th>Verdict</th>
        </>
      }
    >
      {trials.map((trial, index) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: candidates have a number and no other name
        <tr key={index}>
          <td className="nowrap">
            {index + 1}
            {trial.is_chosen && ", chosen"}
          </td>
          <td className="number">{formatBytes(trial.size_bytes)}</td>
          <td>{layersText(trial.layers)}</td>
          <td>{trial.algorithms}</td>
          <td className="number">{measuredText(trial.kl, 3)}</td>
          <td className="number">{formatShare(trial.recovery)}</td>
          <td>{trial.verdict ? <VerdictLevel level={trial.verdict.level} /> : <Empty>not measured</Empty>}</td>
        </tr>
      ))}
    </Table>
  );
}
