import { expect, it } from "vitest";
import { changeOf, ROWS, type Row } from "./change";

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
