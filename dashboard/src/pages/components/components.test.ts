import { expect, it } from "vitest";

const components = import.meta.glob<string>(["../../ui/*.tsx", "../../charts/*.tsx"], {
  query: "?raw",
  import: "default",
  eager: true,
});
const parts = import.meta.glob<string>("./*.tsx", { query: "?raw", import: "default", eager: true });
const EXPORTED = /^export (?:function|class|const) ([A-Z][a-z]\w*)/gm;
const ELSEWHERE = ["Announcer"]; // one for the whole app, in its shell

it("shows every component of src/ui and src/charts", () => {
  const names = Object.values(components).flatMap((source) => [...source.matchAll(EXPORTED)].map(([, name]) => name));
  expect(names.length).toBeGreaterThan(20);
  const shown = Object.values(parts).join("\n");
  expect(names.filter((name) => !ELSEWHERE.includes(name ?? "") && !shown.includes(`<${name}`))).toEqual([]);
});
