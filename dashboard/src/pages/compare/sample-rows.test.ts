import { expect, it } from "vitest";
import { sampleRows } from "./sample-rows";

const sample = (prompt: string, original: string, quantized: string) => ({ prompt, original, quantized });

it("puts the texts of several runs beside each other, as far as they were asked the same", () => {
  const first = sample("A", "a dog", "a cat");
  const second = sample("A", "a dog", "a dog");
  const longer = sample("A", "a dog barks", "a dog barks");
  const other = sample("B", "b", "b");
  expect(sampleRows([[first], [], [second, other], [longer]])).toEqual([
    { prompt: "A", original: "a dog", samples: [first, undefined, second, undefined] },
    { prompt: "B", original: "b", samples: [undefined, undefined, other, undefined] },
    { prompt: "A", original: "a dog barks", samples: [undefined, undefined, undefined, longer] },
  ]);
  expect(sampleRows([])).toEqual([]);
});
