import { expect, it } from "vitest";
import document from "../../openapi.json";
import { ACTIONS, FINAL_STATES, STATES } from "./states";

it("every state of the service has an icon, a text and its actions", () => {
  const states = [...document.components.schemas.State.enum].sort();
  expect(Object.keys(STATES).sort()).toEqual(states);
  expect(Object.keys(ACTIONS).sort()).toEqual(states);
  for (const state of FINAL_STATES) expect(ACTIONS[state]).toContain("delete");
});
