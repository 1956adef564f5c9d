import type { ReactNode } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import {
  type Drafts,
  type Job,
  type Measured,
  type Quality,
  type Report,
  type Summary,
  summaryOf,
} from "../../api/types";
import { formatBytes, formatDuration, formatLoss, formatNumber, formatPercent, formatShare } from "../../format";
import { LABELS } from "../../labels";
import { Link } from "../../link";
import { layersText } from "../../names";
import { Empty, Facts } from "../../ui/basics";
import { Table } from "../../ui/table";
import { halfInterval } from "../compare/change";
import { Checks, checksText } from "./checks";
import { Behaviour, ByPosition, Clipping, KvCaches, OwnAnswers } from "./differences";
import { type EventLog, latestLayers } from "./event-log";
import { GoalCard, GoalSoFar } from "./goal";
import { LayersCard } from "./layers-card";
import { MemoryCard } from "./memory";
import { memoryText } from "./memory-text";
import { Phases } from "./phases";
import { publicationText } from "./publish";
import { Samples } from "./samples";
import { UseIt } from "./use-it";
import { divergenceText, measuredText, ratioText } from "./verdict";
import { VerdictNotice } from "./verdict-notice";

export function Overview({ job, eventLog }: { job: Job; eventLog: EventLog }) {
  const summary = summaryOf(job);
  const hasReport = job.state === "succeeded";
  const report = useQuery(hasReport ? `report ${job.id}` : null, (signal) =>
    get<Report>(`/v1/jobs/${job.id}/artifacts/report.json`, {}, signal),
  );
  return (
    <>
      {summary && <Result job={job} summary={summary} report={report.data} />}
      {report.data?.goal && <GoalCard goal={report.data.goal} />}
      {job.goal && !hasReport && <GoalSoFar goal={job.goal} trials={eventLog.trials} />}
      {hasReport && <Phases job={job} eventLog={eventLog} />}
      {hasReport && <UseIt job={job} />}
      <LayersCard job={job} layers={latestLayers(eventLog.layers)} report={report.data} />
      {report.data && <Proof report={report.data} />}
      <div className="columns">
        <MemoryCard memory={eventLog.memory} summary={summary} />
        {(report.data || eventLog.warnings.length > 0) && (
          <Fallbacks kept={report.data?.kept ?? []} warnings={report.data?.warnings ?? eventLog.warnings} />
        )}
      </div>
    </>
  );
}

function Result({ job, summary, report }: { job: Job; summary: Summary; report: Report | undefined }) {
  const { id, publication } = job;
  const { perplexity_before: before, perplexity_after: after, perplexity_ratio: ratio, goal } = summary;
  return (
    <section className="card" aria-label="Result">
      {summary.verdict && (
        <VerdictNotice
          job={job}
          verdict={summary.verdict}
          figures={[divergenceText(summary), report?.quality && ratioText(report.quality.ratio)]
            .filter(Boolean)
            .join(". ")}
        />
      )}
      {report?.samples && <Samples samples={report.samples} />}
      <Facts
        facts={[
          ...(goal ? [[LABELS.goal, goal.is_met ? "met" : "✕ missed"] as [string, string]] : []),
          [
            "Size",
            `${formatBytes(summary.size_before_bytes)} → ${formatBytes(summary.size_after_bytes)} (${formatPercent(summary.size_after_bytes / summary.size_before_bytes - 1, 0)})`,
          ],
          [
            "Perplexity",
            before != null && after != null
              ? `${formatNumber(before, 5)} → ${formatNumber(after, 5)}${ratio ? ` (${formatLoss(ratio - 1)})` : ""}`
              : "not measured",
          ],
          ...(summary.gates?.length ? [["Checks", checksText(summary.gates)] as [string, string]] : []),
          ...(publication
            ? [
                [
                  "Publication",
                  <Link key="publication" to="/jobs/$id" params={{ id: id }} search={{ tab: "artifacts" }}>
                    {publicationText(publication)}
                  </Link>,
                ] as [string, ReactNode],
              ]
            : []),
          ...(summary.mix ? [[LABELS.mix, mixText(summary.mix)] as [string, string]] : []),
          ["Layers", `${summary.num_layers_quantized} quantized, ${summary.num_layers_kept} left as they were`],
          worstLayer(summary.worst_layer),
          ["Duration", formatDuration(summary.total_s)],
          [LABELS.peakMemory, memoryText(summary).text],
          ...Object.entries(summary.failed_tasks ?? {}).map(
            ([task, reason]) => [`Task ${task}`, `failed: ${reason}`] as [string, string],
          ),
        ]}
      />
    </section>
  );
}

/** The layer whose output changed most; the one whose weight did where outputs were not measured. */
const worstLayer = ({ name, output_error: error, sqnr_db: decibels }: Summary["worst_layer"]): [string, string] =>
  error == null
    ? ["Largest weight error", `${name} (${formatNumber(decibels)} dB)`]
    : ["Worst layer", `${name} (${formatShare(error)} of its output)`];

/** "16 w4a16, 5 int8_weight_only; 4.9 bits per weight, KL 0.12 without GPTQ" */
function mixText({ layers, bits, kl_mean: divergence }: NonNullable<Summary["mix"]>) {
  return `${layersText(layers)}; ${formatNumber(bits, 3)} bits per weight, KL ${formatNumber(divergence, 3)} without GPTQ`;
}

function Proof({ report }: { report: Report }) {
  return (
    <section className="card">
      <h2>Verification</h2>
      <p className="hint">Each export was read back from disk by a separate process that had only the files.</p>
      <Table
        head={
          <>
            <th>Export</th>
            <th className="number">Matching tensors</th>
            <th className="number">Max logit difference</th>
            <th className="number">Perplexity</th>
            <th>Loaded by</th>
          </>
        }
      >
        {Object.entries(report.proof ?? {}).map(([name, proof]) => (
          <tr key={name}>
            <td className="nowrap">✓ {name}</td>
            <td className="number">{proof.num_tensors_equal}</td>
            <td className="number">{formatNumber(proof.max_logit_difference, 3)}</td>
            <td className="number">{formatNumber(proof.perplexity, 5)}</td>
            <td className="wide">{proof.consumer_check?.consumer ?? proof.consumer_check?.not_checked ?? "–"}</td>
          </tr>
        ))}
      </Table>
      {report.quality && <Divergence quality={report.quality} drafts={report.drafts} />}
      {report.quality?.by_position && <ByPosition ranges={report.quality.by_position} />}
      {report.kv_caches && <KvCaches caches={report.kv_caches} />}
      {report.answers && <OwnAnswers answers={report.answers} />}
      {report.behaviour && <Behaviour behaviour={report.behaviour} />}
      {report.clipping && <Clipping shares={report.clipping} />}
      {report.summary.gates && <Checks gates={report.summary.gates} level={report.summary.verdict?.level} />}
      <p className="sub">
        {Object.entries(report.environment ?? {})
          .map(([name, value]) => `${name} ${String(value)}`)
          .join(" · ")}
      </p>
    </section>
  );
}

/** "+0.24 % (−0.04 % to +0.52 %)": sharper than both perplexities, which are measured on pairs of the same tokens. */
function againstOriginal({ value, stderr }: Measured) {
  if (value == null) return "–";
  const half = halfInterval(stderr);
  const show = (ratio: number) => formatLoss(ratio - 1);
  return `${show(value)}${half ? ` (${show(value - half)} to ${show(value + half)})` : ""}`;
}

const acceptance = ({ before, after }: Drafts) =>
  `${before ? measuredText(before, 3) : "–"} → ${measuredText(after, 3)}`;

function Divergence({ quality, drafts }: { quality: Quality; drafts?: Drafts | null }) {
  const { before, after, ratio, divergence, num_tokens } = quality;
  return (
    <>
      <h3>Compared with the original on {formatNumber(num_tokens)} tokens; in brackets the 95 % interval</h3>
      <Facts
        facts={[
          ["Perplexity before", measuredText(before.token_perplexity, 5, true)],
          ["Perplexity after", measuredText(after.token_perplexity, 5, true)],
          ["Perplexity vs. original", againstOriginal(ratio)],
          [LABELS.klMean, measuredText(divergence.kl_mean, 3)],
          ["KL divergence (99th percentile)", formatNumber(divergence.kl_p99, 3)],
          ["Top-1 agreement", measuredText(divergence.top1_agreement, 4)],
          ...(drafts ? [["Drafted tokens accepted", acceptance(drafts)] as [string, string]] : []),
        ]}
      />
    </>
  );
}

/** No silent fallbacks: lists the layers that were not quantized, and all warnings. */
function Fallbacks({ kept, warnings }: { kept: { name: string; reason: string }[]; warnings: string[] }) {
  return (
    <section className="card">
      <h2>Fallbacks and warnings</h2>
      {kept.length + warnings.length === 0 && <Empty>No fallbacks or warnings.</Empty>}
      {warnings.map((warning) => (
        <p key={warning}>⚠ {warning}</p>
      ))}
      {kept.length > 0 && (
        <Table caption="Layers that were not quantized">
          {kept.map((each) => (
            <tr key={each.name}>
              <td>
                <code className="nowrap">{each.name}</code>
              </td>
              <td>{each.reason}</td>
            </tr>
          ))}
        </Table>
      )}
    </section>
  );
}
