import { expect, it } from "vitest";
import { parseSearch, readCompare, readRuns, stringifySearch } from "../../search";
import { compareAllLink, linkTo, MAX_NAMED, readChoice, viewOf } from "./address";
import { run } from "./samples";

const search = (text: string) => readCompare(parseSearch(text));

it("names runs once, or chooses them by the filters of the list", () => {
  expect(readChoice(search("job=b&job=a&job=b&sort=size_bytes"))).toEqual({ ids: ["b", "a"] });
  expect(readChoice(search("q=llama&label=team%3Da&label=x%3Dy"))).toEqual({
    filter: { q: "llama", label: ["team=a", "x=y"] },
  });
  expect(readChoice(search("created_before=2026-11-26T08:00:00Z"))).toHaveProperty("filter");
});

it("compares all results of a filter by an address that is short however many they are", () => {
  const list = readRuns(parseSearch("state=failed&state=running&q=llama&cursor=abc"));
  expect(stringifySearch(compareAllLink(list).search)).toBe("?q=llama&state=succeeded");
});

it("names no more runs than proxies let through", () => {
  const id = `job_${"0".repeat(32)}`;
  expect(`/ui/compare?${`job=${id}&`.repeat(MAX_NAMED)}`.length).toBeLessThan(8000);
});

it("links to a view that later runs do not change", () => {
  const jobs = [run("1"), run("2", { created_at: "2026-11-26T09:00:00.999999Z" })];
  const link = new URL(linkTo(search("model=m&base=job_1"), jobs, "http://here"));
  expect(link.pathname).toBe("/ui/compare");
  expect(link.searchParams.get("base")).toBe("job_1");
  // strictly before: the newest run, of which a browser does not know the last digits, is still in
  expect(link.searchParams.get("created_before")).toBe("2026-11-26T09:00:01.000Z");
  for (const same of ["job=job_1&job=job_2", "model=m&created_before=2026-11-26T08%3A00%3A00Z"]) {
    expect(linkTo(search(same), jobs, "http://here")).toBe(`http://here/ui/compare?${same}`);
  }
});

it("reads the view from the address, with no layers as a choice of its own", () => {
  expect(viewOf(search("job=a"))).toMatchObject({ baseId: null, order: null, overlaid: null, metric: null, kind: "" });
  const view = viewOf(search("model=m&base=b&sort=-size_bytes&layers=none&metric=sqnr_db&kind=q_proj"));
  expect(view).toMatchObject({ baseId: "b", order: "-size_bytes", overlaid: ["none"], metric: "sqnr_db" });
});
