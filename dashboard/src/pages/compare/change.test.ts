import { expect, it } from "vitest";
import type { PairedChange } from "../../api/types";
import { changeOf, ROWS, type Row, verdictOf } from "./change";

const row = (text: string) => ROWS.find((each) => each.text.startsWith(text)) as Row;

it("compares shares by points, never by percentages of percentages", () => {
  expect(changeOf(row("Perplexity vs."), 0.0042, 0.0021)).toEqual({ text: "+0.21 points worse", tone: "bad" });
  expect(changeOf(row("Relative output"), 0.02, 0.03)).toEqual({ text: "−1.00 points better", tone: "good" });
});

it("gives a factor where a percentage would be absurd", () => {
  expect(changeOf(row("KL"), 1.2944, 0.01)).toEqual({ text: "129 times worse", tone: "bad" });
  expect(changeOf(row("Size"), 25, 100)).toEqual({ text: "−75 % better", tone: "good" });
  expect(changeOf(row("Size"), 95, 100)).toEqual({ text: "−5.00 % better", tone: "good" });
});

it("is silent about noise, and judges neither memory nor time", () => {
  expect(changeOf(row("Size"), 163.4, 163.1)).toBeNull();
  expect(changeOf(row("Peak"), 1001.2, 1000)).toBeNull();
  expect(changeOf(row("Peak"), 1200, 1000)).toEqual({ text: "+20 %", tone: "" });
  expect(changeOf(row("Duration"), 200, 100)).toEqual({ text: "2 times", tone: "" });
  expect(changeOf({ ...row("Perplexity"), scale: "none" }, 20, 10)).toBeNull();
});

it("does not call a change nothing because two intervals overlap", () => {
  expect(changeOf(row("KL"), 0.052, 0.05, [0.001, 0.001])).toEqual({ text: "+4.00 %, not tested", tone: "" });
  expect(changeOf(row("KL"), 0.187, 0.119, [0.03, 0.03])).toEqual({ text: "+57 %, not tested", tone: "" });
  expect(changeOf(row("KL"), 0.06, 0.05, [0.001, 0.001])?.tone).toBe("bad");
});

it("shows a large loss without decimals", () => {
  expect([0.0063, 0.9951, 1.4885].map((value) => row("Perplexity vs.").format(value))).toEqual([
    "+0.63 %",
    "+99.51 %",
    "+149 %",
  ]);
});

const interval = (value: number, low: number, high: number) => ({ value, low, high });

it("lets a paired test decide, where two intervals overlap", () => {
  const worse: PairedChange = {
    verdict: "worse",
    tolerance: 0,
    kl_change: interval(0.57, 0.31, 0.88),
    smallest_kl_change: 0.2,
    perplexity_ratio: interval(1.002, 0.999, 1.005),
    top1_difference: interval(0, 0, 0),
  };
  expect(changeOf(row("KL"), 0.187, 0.119, [0.03, 0.03], worse)).toEqual({ text: "+57 % worse", tone: "bad" });
  const same = { text: "+0.20 points, no difference found", tone: "" };
  expect(changeOf(row("Perplexity vs."), 0.004, 0.002, [0.001, 0.001], worse)).toEqual(same);
  expect(changeOf(row("Size"), 200, 100, [0, 0], worse)?.text).toBe("2 times worse");
  expect(verdictOf(worse)).toEqual({ text: "worse", tone: "bad", interval: "KL +31 % to +88 %" });
  expect(verdictOf({ ...worse, kl_change: interval(9, 8.5, 9.5) }).interval).toBe("KL 9.5 to 10.5 times");
  const equal: PairedChange = { ...worse, verdict: "no difference found", kl_change: interval(0, -0.02, 0.02) };
  expect(changeOf(row("KL"), 0.1, 0.1, [0, 0], equal)).toEqual({ text: "no difference found", tone: "" });
  expect(verdictOf(equal)).toEqual({ text: "no difference found", tone: "", interval: "KL −2.0 % to +2.0 %" });
});
