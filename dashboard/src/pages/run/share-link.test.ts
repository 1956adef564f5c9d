import { expect, it } from "vitest";
import { isOfThisMachine } from "./share-link";

it("knows the addresses that lead to the reader's own machine", () => {
  const links = ["http://127.0.0.1:8765/v1/shared/t", "http://localhost:1/x", "http://[::1]:8765/x"];
  expect(links.filter(isOfThisMachine)).toEqual(links);
  const others = ["https://bitfoundry.example/v1/shared/t", "http://10.0.0.7:8765/x", "http://127.0.0.1.example/x"];
  expect(others.filter(isOfThisMachine)).toEqual([]);
});
