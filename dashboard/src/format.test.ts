import { describe, expect, it } from "vitest";
import { formatAge, formatBytes, formatDuration, formatEstimate, formatNumber, formatPercent, plural } from "./format";

describe("formatBytes", () => {
  it.each([
    [0, "0 B"],
    [999, "999 B"],
    [1000, "1.0 kB"],
    [126_048, "126 kB"],
    [99_960, "100 kB"],
    [999_600, "1.0 MB"],
    [12_340_000, "12.3 MB"],
    [5_000_000_000_000, "5.0 TB"],
    [null, "–"],
  ])("%s is %s", (bytes, text) => expect(formatBytes(bytes)).toBe(text));
});

describe("formatPercent", () => {
  it("always has a sign", () => {
    expect(formatPercent(0.0604, 2)).toBe("+6.04 %");
    expect(formatPercent(-0.56, 0)).toBe("−56 %");
    expect(formatPercent(0.00001, 2)).toBe("±0.00 %");
  });
});

describe("times", () => {
  it.each([
    [0.2, "< 1 s"],
    [59.4, "59 s"],
    [61, "1 min 1 s"],
    [3599, "1 h 0 min"],
    [7260, "2 h 1 min"],
    [3 * 86400, "3 d"],
    [undefined, "–"],
  ])("%s s are %s", (seconds, text) => expect(formatDuration(seconds)).toBe(text));

  it.each([
    [1, "about 5 s"],
    [42, "about 40 s"],
    [58, "about 1 min"],
    [351, "about 6 min"],
    [7400, "about 2 h 0 min"],
  ])("an estimate of %s s is %s", (seconds, text) => expect(formatEstimate(seconds)).toBe(text));

  it("ages of both directions", () => {
    expect(formatAge(2000)).toBe("just now");
    expect(formatAge(90_000)).toBe("2 min ago");
    expect(formatAge(-7_200_000)).toBe("in 2 h");
  });
});

it("numbers keep four digits", () => {
  expect(formatNumber(1954.629)).toBe("1955");
  expect(formatNumber(0.00001234)).toBe("1.23e-5");
  expect(formatNumber(123456)).toBe("123,456");
  expect(plural(1, "run")).toBe("1 run");
  expect(plural(1200, "run")).toBe("1,200 runs");
});
