import { beforeEach, expect, it, vi } from "vitest";
import { address, forgetAnswers, get, Problem, post, setCsrfToken, Unreachable, whenSignedOut } from "./client";
import { connection } from "./connection";

const answers: Response[] = [];
const sent: [string, RequestInit][] = [];

beforeEach(() => {
  answers.length = sent.length = 0;
  forgetAnswers();
  vi.stubGlobal("fetch", async (url: string, init: RequestInit) => {
    sent.push([url, init]);
    const answer = answers.shift();
    if (!answer) throw new TypeError("Failed to fetch");
    return answer;
  });
});

const headersOf = (index: number) => sent[index]?.[1].headers as Record<string, string>;

it("writes lists as repeated parameters and leaves out what is empty", () => {
  expect(address("/v1/jobs", { state: ["a", "b"], q: "", cursor: null, limit: 5 })).toBe(
    "/v1/jobs?state=a&state=b&limit=5",
  );
});

it("asks with the ETag, and gives the very same object for a 304", async () => {
  answers.push(new Response('{"data": []}', { headers: { ETag: '"1"' } }), new Response(null, { status: 304 }));
  const first = await get("/v1/jobs");
  expect(await get("/v1/jobs")).toBe(first);
  expect(headersOf(0)["If-None-Match"]).toBeUndefined();
  expect(headersOf(1)["If-None-Match"]).toBe('"1"');
});

it("sends the CSRF token with what changes something, and only there", async () => {
  setCsrfToken("token");
  answers.push(new Response("{}"), new Response("{}"));
  await get("/v1/jobs");
  await post("/v1/jobs", {});
  expect(headersOf(0)["X-CSRF-Token"]).toBeUndefined();
  expect(headersOf(1)["X-CSRF-Token"]).toBe("token");
});

it("tells a problem with its code and hint, and of a 401 that nobody is signed in", async () => {
  const signedOut = vi.fn();
  whenSignedOut(signedOut);
  const body = {
    detail: "No.",
    code: "unauthorized",
    hint: "Do.",
    errors: [{ pointer: "#/a", detail: "d", code: "c" }],
  };
  answers.push(new Response(JSON.stringify(body), { status: 401 }));
  const problem = await get("/v1/jobs").catch((error: Problem) => error);
  expect(problem).toBeInstanceOf(Problem);
  expect(problem).toMatchObject({ message: "No.", code: "unauthorized", hint: "Do.", status: 401 });
  expect(signedOut).toHaveBeenCalledOnce();
});

it("knows when the service is away, and when it is back", async () => {
  await expect(get("/v1/jobs")).rejects.toBeInstanceOf(Unreachable);
  expect(connection.isLost()).toBe(true);
  answers.push(new Response("{}"));
  await get("/v1/jobs");
  expect(connection.isLost()).toBe(false);
});

it("never takes an answer that breaks off for an empty one, nor remembers it", async () => {
  const cut = () => {
    const body = new ReadableStream({
      start: (controller) => controller.enqueue(new TextEncoder().encode('{"id": ')),
      pull: (controller) => controller.error(new TypeError("network error")),
    });
    return new Response(body, { headers: { ETag: '"1"' } });
  };
  answers.push(cut(), cut(), new Response('{"id": 1}'));
  await expect(get("/v1/jobs/a")).rejects.toBeInstanceOf(Unreachable);
  const aborted = AbortSignal.abort();
  await expect(get("/v1/jobs/a", {}, aborted)).rejects.toBeInstanceOf(TypeError); // nobody waits for it any more
  expect(await get("/v1/jobs/a")).toEqual({ id: 1 });
  expect(headersOf(2)["If-None-Match"]).toBeUndefined();
});
