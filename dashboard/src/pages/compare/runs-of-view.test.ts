import { expect, it } from "vitest";
import { resultsOf, sorted, uniqueNames } from "./runs-of-view";
import { run } from "./samples";

const ids = (jobs: { id: string }[]) => jobs.map(({ id }) => id.replace("job_", "")).join(" ");

it("tells runs of the same name apart by the end of their ids", () => {
  const jobs = [run("0000000000001", { name: "nightly" }), run("0000000000002", { name: "nightly" }), run("3")];
  expect([...uniqueNames(jobs).values()]).toEqual(["nightly …00000001", "nightly …00000002", "run 3"]);
});

it("sorts by a metric in both directions, with the baseline first and what was not measured last", () => {
  const jobs = [
    run("a", {}, { size_after_bytes: 30 }),
    run("b", {}, null),
    run("c", {}, { size_after_bytes: 10 }),
    run("d", {}, { size_after_bytes: 20 }),
  ];
  const base = jobs[0] as (typeof jobs)[0];
  expect(ids(sorted(jobs, base, "size_bytes"))).toBe("a c d b");
  expect(ids(sorted(jobs, base, "-size_bytes"))).toBe("a d c b");
  expect(ids(sorted(jobs, jobs[2] as typeof base, null))).toBe("c a b d");
  expect(ids(sorted(jobs, base, "no_such_metric"))).toBe("a b c d");
});

it("charts the runs whose perplexity was measured, with its own standard error", () => {
  const jobs = [run("a"), run("b", {}, { perplexity_ratio: null }), run("c", {}, null)];
  const [result, ...others] = resultsOf(jobs, uniqueNames(jobs));
  expect(others).toEqual([]);
  expect(result).toMatchObject({ name: "run a", bytes: 60, stderr: 0.001, model: "/models/tiny", preset: "fp8" });
  expect(result?.loss).toBeCloseTo(0.0063, 6);
});
