import { scrollable } from "../../ui/basics";
import { type Sample, samplesText, splitSample } from "./sample-texts";

/** What both models write, side by side; everything from the first difference on is marked. */
export function Samples({ samples }: { samples: Sample[] }) {
  return (
    <details>
      <summary>Sample outputs: {samplesText(samples)}</summary>
      <SampleTable
        columns={[{ id: "quantized", title: "Quantized model" }]}
        rows={samples.map((sample) => ({ ...sample, samples: [sample] }))}
      />
    </details>
  );
}

/** The answers to one prompt: the original's, and one of every column, if it was asked this. */
export interface SampleRow {
  prompt: string;
  original: string;
  samples: (Sample | undefined)[];
}

export function SampleTable({ columns, rows }: { columns: { id: string; title?: string }[]; rows: SampleRow[] }) {
  return (
    <div className="table" ref={scrollable}>
      <table className="samples">
        <thead>
          <tr>
            <th>Prompt</th>
            <th>Original model</th>
            {columns.map(({ id, title }) => (
              <th key={id}>{title}</th>
            ))}
          </tr>
        </thead>
        <tbody>
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
        </tbody>
      </table>
    </div>
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
