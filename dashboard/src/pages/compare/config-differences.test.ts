import { expect, it } from "vitest";
import { differingFields } from "./config-differences";
import { run } from "./samples";

it("lists the fields that differ, each with its values and their runs, that of most runs first", () => {
  const base = run("a", { config: { weight: { dtype: "int8", group: 64 }, kv: null } });
  const jobs = [
    base,
    run("b", { config: { weight: { dtype: "int8", group: 64 } } }),
    run("c", { config: { weight: { dtype: "fp8", group: 64 } } }),
    run("d", { config: { weight: { dtype: "int4", group: 64 } } }),
    run("e", { config: { weight: { dtype: "int4", group: 64 } }, model: { path: "/models/other" } }),
  ];
  expect(differingFields(base, jobs)).toEqual([
    {
      pointer: "/config/weight/dtype",
      value: "int8",
      others: [
        { value: "int4", ids: ["job_d", "job_e"] },
        { value: "fp8", ids: ["job_c"] },
      ],
    },
    { pointer: "/model/path", value: "/models/tiny", others: [{ value: "/models/other", ids: ["job_e"] }] },
  ]);
  expect(differingFields(base, [base])).toEqual([]);
});
