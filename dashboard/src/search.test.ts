import { expect, it } from "vitest";
import { parseSearch, readModels, readRuns, stringifySearch } from "./search";

it("keeps an address as it is", () => {
  for (const text of ["", "?q=1e3&state=failed&state=running&label=team%3Da", "?model=%2Fmodels%2Fa%26b+%231", "?q="]) {
    expect(stringifySearch(parseSearch(text))).toBe(text);
  }
  expect(stringifySearch({ cursor: undefined, state: [], q: "x" })).toBe("?q=x");
});

it("reads texts and lists, however often they are there, and nothing else", () => {
  const read = readRuns(parseSearch("?state=failed&q=true&q=b&label=a%3Db&label=1&other=x"));
  expect(read).toEqual({ state: ["failed"], q: "true", label: ["a=b", "1"] });
  expect(readModels(parseSearch("?model=/models/a%26b%20%231"))).toEqual({ model: "/models/a&b #1" });
});
