import { expect, it } from "vitest";
import { heightsOf, outliersText } from "./histogram";

it("shows few weights beside many", () => {
  const [few, most, none] = heightsOf([3, 100_000, 0]);
  expect(most).toBe(1);
  expect(few).toBeGreaterThan(0.1);
  expect(none).toBe(0);
  expect(heightsOf([0, 0])).toEqual([0, 0]);
});

it("names outlier channels, or says that there are none", () => {
  expect(outliersText([])).toBe("none above 3 times the median");
  const found = [
    { channel: 12, ratio: 5.12 },
    { channel: 40, ratio: 3.2 },
  ];
  expect(outliersText(found)).toBe("12 (5.1 times the median), 40 (3.2 times)");
});
