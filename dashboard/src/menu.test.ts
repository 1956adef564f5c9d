import { expect, it } from "vitest";
import { isShown, matching, menuFor, sectionOf } from "./menu";

const ALL = ["jobs:write", "operator", "admin"];

it("offers only what the key may open", () => {
  const texts = (scopes: string[]) => menuFor(scopes).sections.map(({ pages }) => pages.map(({ text }) => text));
  expect(texts(ALL)).toEqual([
    ["API keys", "Webhooks", "Members", "Audit log", "Project"],
    ["Workers", "Queue", "System"],
  ]);
  expect(texts([])).toEqual([["Project"], ["Queue", "System"]]);
  expect(menuFor([]).newJob).toBeUndefined();
});

it("marks the entry and the section of a page", () => {
  expect(["/", "/jobs", "/jobs/new", "/jobs/job_1"].filter((path) => isShown("/", path))).toHaveLength(4);
  expect(isShown("/", "/models")).toBe(false);
  const { sections } = menuFor(ALL);
  expect(sectionOf(sections, "/audit")?.text).toBe("Settings");
  expect(sectionOf(sections, "/queue")?.text).toBe("Operations");
  expect(sectionOf(sections, "/models")).toBeUndefined();
});

it("finds an entry by words in any order", () => {
  const entries = [{ text: "API keys", hint: "Settings" }, { text: "Queue" }];
  expect(matching(entries, "KEYS set")).toEqual([entries[0]]);
  expect(matching(entries, " ")).toEqual(entries);
  expect(matching(entries, "keys queue")).toEqual([]);
});
