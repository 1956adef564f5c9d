import { expect, it } from "vitest";
import { entriesToAdd } from "./plan-error";

const problem = (message: string, hint: string, ...errors: object[]) => ({ message, hint, errors }) as never;

it("does not repeat what the message says", () => {
  const missing = { pointer: "#/model/path", detail: "There is no model folder at /models/x." };
  expect(entriesToAdd(problem("There is no model folder at /models/x.", "Provide a folder.", missing))).toEqual([]);
  const device = { pointer: "#/goal/device", detail: "Unknown device 'x'.", allowed: ["t4", "h100"] };
  expect(entriesToAdd(problem("Unknown device 'x'.", "Available: t4, h100.", device))).toEqual([]);
});

it("keeps other faults and the values that are allowed", () => {
  const path = { pointer: "#/model/path", detail: "The path '/etc' is not allowed.", allowed: ["/models"] };
  expect(entriesToAdd(problem("The path '/etc' is not allowed.", "Use another.", path))).toEqual([path]);
  const second = { pointer: "#/priority", detail: "it must be at most 9" };
  expect(entriesToAdd(problem("/seed is not valid: it must be a whole number.", "", second))).toEqual([second]);
});
