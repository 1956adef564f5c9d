import { expect, test } from "vitest";
import { samplesText, splitSample } from "./sample-texts";

const sample = (original: string, quantized: string) => ({ prompt: "Write.", original, quantized });

test("a sample is split at the first different character", () => {
  expect(splitSample(sample("a red fox", "a red fox"))).toEqual(["a red fox", ""]);
  expect(splitSample(sample("a red fox", "a red dog"))).toEqual(["a red ", "dog"]);
  expect(splitSample(sample("a red", "a red fox"))).toEqual(["a red", " fox"]);
  expect(splitSample(sample("a red fox", "a red"))).toEqual(["a red", ""]);
  expect(splitSample(sample("🦊 a", "🦝 a"))).toEqual(["", "🦝 a"]);
});

test("the samples that differ are counted, a shorter one too", () => {
  expect(samplesText([sample("a", "a")])).toBe("all identical to the original's");
  expect(samplesText([sample("a", "a"), sample("a b", "a"), sample("", "c")])).toBe(
    "2 of 3 differ from the original's",
  );
});
