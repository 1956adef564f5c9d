import { createElement } from "react";
import { renderToStaticMarkup } from "react-dom/server";
import { expect, it } from "vitest";
import type { Report } from "../../api/types";
import { KvCaches } from "./differences";

type Caches = NonNullable<Report["kv_caches"]>;

const cache = (dtype: string, level: string, ratio: number | null) => ({
  dtype,
  program: "llama.cpp",
  option: `--cache-type-k ${dtype} --cache-type-v ${dtype}`,
  bytes_per_token: 408,
  bytes_per_token_of_16_bits: 768,
  num_blocks: 3,
  num_blocks_spared: 0,
  num_blocks_without: 0,
  quality: { ratio: { value: ratio, stderr: 0.01 }, divergence: { kl_mean: { value: 0.0036, stderr: null } } },
  level,
});

const shown = (caches: unknown[]) =>
  renderToStaticMarkup(createElement(KvCaches, { caches: caches as Caches })).replaceAll(/<[^>]*>/g, "|");

it("shows what each dtype of the KV cache takes and costs", () => {
  const text = shown([cache("q8_0", "faithful", 1.038), cache("q4_0", "broken", null)]);
  expect(text).toContain("which takes 768 bytes per token.");
  expect(text).toContain("|q8_0||408 (53 %)||+3.80 %||0.0036||faithful|");
  expect(text).toContain("--cache-type-k q8_0 --cache-type-v q8_0");
  expect(text).toContain("|q4_0||408 (53 %)||–||0.0036||broken|");
  expect(text).not.toContain("TurboQuant");
});

it("says which blocks keep 16 bits all the same", () => {
  expect(shown([{ ...cache("turboquant_k8v4", "good", 1), num_blocks_spared: 4 }])).toContain("16 bits in 4 blocks");
});
