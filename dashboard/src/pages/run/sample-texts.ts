// What both models write for the prompts of the evaluation, compared.

export interface Sample {
  prompt: string;
  original: string;
  quantized: string;
}

/** The quantized model's text as far as both are equal, and the rest. */
export function splitSample({ original, quantized }: Sample): [string, string] {
  const [before, after] = [[...original], [...quantized]]; // whole characters: an emoji is two units of a string
  const end = after.findIndex((character, index) => character !== before[index]);
  return end < 0 ? [quantized, ""] : [after.slice(0, end).join(""), after.slice(end).join("")];
}

/** "2 of 4 differ from the original's" */
export function samplesText(samples: Sample[]): string {
  const different = samples.filter(({ original, quantized }) => original !== quantized).length;
  return different ? `${different} of ${samples.length} differ from the original's` : "all identical to the original's";
}
