import { scrollable } from "../../ui/basics";
import { type Sample, samplesText, splitSample } from "./sample-texts";

/** What both models write, side by side; everything from the first difference on is marked. */
export function Samples({ samples }: { samples: Sample[] }) {
  return (
    <details>
      <summary>Sample outputs: {samplesText(samples)}</summary>
      <div className="table" ref={scrollable}>
        <table className="samples">
          <thead>
            <tr>
              <th>Prompt</th>
              <th>Original model</th>
              <th>Quantized model</th>
            </tr>
          </thead>
          <tbody>
            {samples.map((sample) => (
              <tr key={sample.prompt}>
                <td>{sample.prompt}</td>
                <td className="answer">{sample.original}</td>
                <td className="answer">
                  <Marked sample={sample} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

/** What the quantized model writes, marked from the first difference on. */
export function Marked({ sample }: { sample: Sample }) {
  const [same, different] = splitSample(sample);
  return (
    <>
      {same}
      {different && <mark>{different}</mark>}
    </>
  );
}
