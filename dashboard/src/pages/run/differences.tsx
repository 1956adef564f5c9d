import type { Quality, Report } from "../../api/types";
import { formatLoss, formatNumber, formatShare } from "../../format";
import { LABELS } from "../../labels";
import { Table } from "../../ui/table";
import { measuredText, toneOf } from "./verdict";

type Ranges = NonNullable<Quality["by_position"]>;

type Row = Pick<Ranges[number], "num_tokens" | "kl_mean" | "top1_agreement"> & { name: string };

function Distances({ caption, of, rows }: { caption: string; of: string; rows: Row[] }) {
  if (rows.length === 0) return null;
  return (
    <Table
      caption={caption}
      head={
        <>
          <th>{of}</th>
          <th className="number">Tokens</th>
          <th className="number">{LABELS.klMean}</th>
          <th className="number">Top-1 agreement</th>
        </>
      }
    >
      {rows.map((row) => (
        <tr key={row.name}>
          <td className="nowrap">{row.name}</td>
          <td className="number">{formatNumber(row.num_tokens)}</td>
          <td className="number nowrap">{measuredText(row.kl_mean, 3)}</td>
          <td className="number nowrap">{measuredText(row.top1_agreement, 4)}</td>
        </tr>
      ))}
    </Table>
  );
}

/** How far the predictions are from the original's at the beginning of a window, and further on. */
export function ByPosition({ ranges }: { ranges: Ranges }) {
  const rows = ranges.map((range) => ({
    ...range,
    name: `${formatNumber(range.first)} to ${formatNumber(range.last)}`,
  }));
  const caption = "By position in a window. If the error grows with the context, the values rise from row to row.";
  return <Distances caption={caption} of="Positions" rows={rows} />;
}

/** How far the predictions are from the original's on answers that the original gave itself, by kind of prompt. */
export function OwnAnswers({ answers }: { answers: NonNullable<Report["answers"]> }) {
  const { by_kind, divergence, num_tokens, num_windows, left_out } = answers;
  const every = { name: "all", num_tokens, kl_mean: divergence.kl_mean, top1_agreement: divergence.top1_agreement };
  const rows = [...by_kind.map((each) => ({ ...each, name: each.kind })), every];
  return (
    <>
      <h3>Own answers</h3>
      <Distances
        caption={`Predictions of both models on ${num_windows} answers that the original gave itself.`}
        of="Prompts"
        rows={rows}
      />
      {Object.entries(left_out ?? {}).map(([kind, reason]) => (
        <p className="hint" key={kind}>
          Left out, in part or at all: {kind} ({reason})
        </p>
      ))}
    </>
  );
}

/** How often answers of both models have each fault, and what is certainly worse. */
export function Behaviour({ behaviour }: { behaviour: NonNullable<Report["behaviour"]> }) {
  const { faults, length, lost_ends, max_tokens, num_prompts, num_rendered_otherwise, left_out } = behaviour;
  return (
    <>
      <h3>Behaviour</h3>
      {lost_ends.length > 0 && <p className="hint">No longer ends an answer: {lost_ends.join(", ")}</p>}
      {num_rendered_otherwise > 0 && (
        <p className="hint">
          Prompts with other tokens than the original's: {num_rendered_otherwise} of {num_prompts}
        </p>
      )}
      <Table
        caption={
          <>
            {`Answers of both models to ${num_prompts} prompts, in at most ${max_tokens} tokens each.`}
            {length && ` The answers are ${formatNumber(length.ratio.value, 3)} times as long as the original's.`}
          </>
        }
        head={
          <>
            <th>Answers that ...</th>
            <th className="number">Original</th>
            <th className="number">Quantized</th>
            <th>Prompts</th>
          </>
        }
      >
        {faults.map((each) => (
          <tr key={each.fault}>
            <td className="nowrap">{each.title}</td>
            <td className="number">{formatShare(each.original)}</td>
            <td className="number">{formatShare(each.result)}</td>
            <td className="wide">
              {`${each.is_worse ? "Worse: more" : "More"} on ${each.num_worse} of ${each.num_prompts}, fewer on ${each.num_better}`}
              {each.num_needed != null && `; about ${formatNumber(each.num_needed)} prompts would tell`}
            </td>
          </tr>
        ))}
      </Table>
      {Object.entries(left_out ?? {}).map(([kind, reason]) => (
        <p className="hint" key={kind}>
          Left out, in part or at all: {kind} ({reason})
        </p>
      ))}
    </>
  );
}

/** What a KV cache of each dtype costs the result, beside itself with a cache of 16 bits. */
export function KvCaches({ caches }: { caches: NonNullable<Report["kv_caches"]> }) {
  const [first] = caches;
  if (!first) return null;
  const spared = Math.max(...caches.map((each) => each.num_blocks_spared));
  return (
    <>
      <h3>KV caches of fewer bits</h3>
      <Table
        caption={`Beside the result itself with a KV cache of 16 bits, which takes ${formatNumber(first.bytes_per_token_of_16_bits)} bytes per token.`}
        head={
          <>
            <th>KV cache</th>
            <th className="number">Bytes per token</th>
            <th className="number">Perplexity</th>
            <th className="number">{LABELS.klMean}</th>
            <th>Verdict</th>
            <th>Chosen by</th>
          </>
        }
      >
        {caches.map(({ dtype, program, option, level, quality, ...sizes }) => (
          <tr key={dtype}>
            <td className="nowrap">{dtype}</td>
            <td className="number nowrap">
              {`${formatNumber(sizes.bytes_per_token)} (${formatShare(sizes.bytes_per_token / sizes.bytes_per_token_of_16_bits, 0)})`}
            </td>
            <td className="number nowrap">{quality.ratio.value == null ? "–" : formatLoss(quality.ratio.value - 1)}</td>
            <td className="number nowrap">{measuredText(quality.divergence.kl_mean, 3)}</td>
            <td className={toneOf(level)}>{level}</td>
            <td className="nowrap">
              {program} <code>{option}</code>
            </td>
          </tr>
        ))}
      </Table>
      {spared > 0 && <p className="hint">TurboQuant keeps 16 bits in {spared} blocks, as vLLM does.</p>}
    </>
  );
}

/** The share of values that static ranges of activations clip, by kind of tensor, the largest first. */
export function Clipping({ shares }: { shares: NonNullable<Report["clipping"]> }) {
  return (
    <>
      <h3>Clipping by kind of layer</h3>
      <Table
        caption="Values on held-out text outside the static activation ranges, for all blocks."
        head={
          <>
            <th>Tensor</th>
            <th className="number">Clipped</th>
          </>
        }
      >
        {Object.entries(shares)
          .sort(([, one], [, other]) => other - one)
          .map(([kind, share]) => (
            <tr key={kind}>
              <td>
                <code>{kind}</code>
              </td>
              <td className="number">{formatShare(share)}</td>
            </tr>
          ))}
      </Table>
    </>
  );
}
