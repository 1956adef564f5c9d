import { expect, it } from "vitest";
import type { AliasRequest, Key } from "../../api/types";
import { ALIAS, allowedFor, changeText, MODEL_NAME, nameFor } from "./rules";

const ADA = { id: "mem_ada", name: "Ada" };
const GRACE = { id: "mem_grace", name: "Grace" };
const ADMIN: Key["scopes"] = ["jobs:read", "jobs:write", "admin"];

const request = (fields: Partial<AliasRequest> = {}): AliasRequest => ({
  id: "rqs_1",
  model: "support-bot",
  alias: "production",
  from_version: 2,
  to_version: 3,
  verdict: "good",
  reason: "better",
  state: "pending",
  asked_by: { key_id: "k1", name: "laptop", member: ADA },
  created_at: "2026-11-22T08:00:00Z",
  decided_by: null,
  decided_at: null,
  comment: null,
  ...fields,
});

it("lets another member with the scope admin decide, and nobody else", () => {
  const may = (id: string, member: typeof ADA | null, scopes: Key["scopes"]) => {
    const { decide, withdraw, why } = allowedFor(request(), { id, member, scopes });
    return [decide, withdraw, Boolean(why)];
  };
  expect(may("k2", GRACE, ADMIN)).toEqual([true, false, false]);
  expect(may("k1", ADA, ADMIN)).toEqual([false, true, true]);
  expect(may("k3", ADA, ADMIN)).toEqual([false, true, true]); // another key of the same person
  expect(may("k3", ADA, ["jobs:read"])).toEqual([false, false, true]);
  expect(may("k4", null, ADMIN)).toEqual([false, false, true]); // a program
  expect(may("k5", GRACE, ["jobs:read", "jobs:write"])).toEqual([false, false, true]);
});

it("lets a program withdraw what it asked for", () => {
  const asked = request({ asked_by: { key_id: "k4", name: "pipeline", member: null } });
  expect(allowedFor(asked, { id: "k4", member: null, scopes: ADMIN })).toMatchObject({ decide: false, withdraw: true });
  expect(allowedFor(asked, { id: "k5", member: null, scopes: ADMIN })).toMatchObject({
    decide: false,
    withdraw: false,
  });
  expect(allowedFor(asked, { id: "k2", member: GRACE, scopes: ADMIN })).toMatchObject({ decide: true });
});

it("says how the alias moves", () => {
  expect(changeText(request())).toBe("version 2 → 3");
  expect(changeText(request({ from_version: null }))).toBe("new → version 3");
  expect(changeText(request({ to_version: null }))).toBe("remove (now version 2)");
});

it("suggests names that the registry takes", () => {
  for (const [text, name] of [
    ["Support Bot (w4a16)", "support-bot-w4a16"],
    ["_x", "x"],
    ["a".repeat(80), "a".repeat(63)],
    ["…", ""],
  ]) {
    expect(nameFor(text ?? "")).toBe(name);
    if (name) expect(name).toMatch(new RegExp(`^${MODEL_NAME}$`, "v"));
  }
  expect("production").toMatch(new RegExp(`^${ALIAS}$`, "v"));
  expect("Production").not.toMatch(new RegExp(`^${ALIAS}$`, "v"));
});
