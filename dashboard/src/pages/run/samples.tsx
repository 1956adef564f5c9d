import { plural } from "../../format";
import { Table } from "../../ui/table";
import { type Sample, samplesText, splitSample } from "./sample-texts";

const SHOWN = 3;

/** What both models write, side by side; everything from the first difference on is marked. A few are not folded. */
export function Samples({ samples }: { samples: Sample[] }) {
  const more = samples.slice(SHOWN);
  return (
    <>
      <h3>Sample outputs: {samplesText(samples)}</h3>
      <SampleTable columns={COLUMNS} rows={rowsOf(samples.slice(0, SHOWN))} />
      {more.length > 0 && (
        <details>
          <summary>{plural(more.length, "more sample")}</summary>
          <SampleTable columns={COLUMNS} rows={rowsOf(more)} />
        </details>
      )}
    </>
  );
}

const COLUMNS = [{ id: "quantized", title: "Quantized model" }];
const rowsOf = (samples: Sample[]) => samples.map((sample) => ({ ...sample, samples: [sample] }));

/** The answers to one prompt: the original's, and one of every column, if it was asked this. */
export interface SampleRow {
  prompt: string;
  original: string;
  samples: (Sample | undefined)[];
}

export function SampleTable({ columns, rows }: { columns: { id: string; title?: string }[]; rows: SampleRow[] }) {
  return (
    <Table
      className="samples"
      head={
        <>
          <th>Prompt</th>
          <th>Original model</th>
          {columns.map(({ id, title }) => (
            <th key={id}>{title}</th>
          ))}
        </>
      }
    >
      {rows.map((row) => (
        <tr key={JSON.stringify([row.prompt, row.original])}>
          <td>{row.prompt}</td>
          <td className="answer">{row.original}</td>
          {row.samples.map((sample, column) => (
            <td key={columns[column]?.id} className="answer">
              {sample ? <Marked sample={sample} /> : "–"}
            </td>
          ))}
        </tr>
      ))}
    </Table>
  );
}

/** What the quantized model writes, marked from the first difference on. */
function Marked({ sample }: { sample: Sample }) {
  const [same, different] = splitSample(sample);
  return (
    <>
      {same}
      {different && <mark>{different}</mark>}
    </>
  );
}
