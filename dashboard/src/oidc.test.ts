import { beforeEach, expect, it, vi } from "vitest";
import { endSignIn, leave, takeReturn } from "./oidc";

const kept = new Map<string, string>();
const answers: Response[] = [];
const sent: [string, RequestInit][] = [];
const shown: string[] = [];
const left: string[] = [];

beforeEach(() => {
  kept.clear();
  answers.length = sent.length = shown.length = left.length = 0;
  vi.stubGlobal("sessionStorage", {
    getItem: (name: string) => kept.get(name) ?? null,
    setItem: (name: string, value: string) => kept.set(name, value),
    removeItem: (name: string) => kept.delete(name),
  });
  vi.stubGlobal("fetch", async (url: string, init: RequestInit) => {
    sent.push([url, init]);
    const answer = answers.shift();
    if (!answer) throw new TypeError("Failed to fetch");
    return answer;
  });
});

function at(pathname: string, search = "") {
  vi.stubGlobal("window", {
    location: { pathname, search, assign: (url: string) => left.push(url) },
    history: { replaceState: (_: unknown, __: string, url: string) => shown.push(url) },
  });
}

const base = import.meta.env.BASE_URL;

it("comes back to the page from before, without the code in the address", async () => {
  at(`${base}jobs/new`, "?preset=fp8");
  answers.push(new Response('{"authorization_url": "https://login.example.org/auth"}'));
  await leave();
  expect(left).toEqual(["https://login.example.org/auth"]);
  at(`${base}sign-in`, "?code=c&state=s&iss=i&session_state=x");
  expect(takeReturn()).toEqual({ code: "c", state: "s", iss: "i" });
  expect(shown).toEqual([`${base}jobs/new?preset=fp8`]);
  expect(kept.size).toBe(0);
});

it("takes a code from no other page, and nothing from an empty one", () => {
  at(base, "?code=c&state=s");
  expect(takeReturn()).toBeNull();
  at(`${base}sign-in`);
  expect(takeReturn()).toBeNull();
  expect(shown).toEqual([base]);
});

it("sends a code once, and again only if nobody answered", async () => {
  at(base);
  await expect(endSignIn({ code: "c", state: "s" })).rejects.toThrow("not responding");
  answers.push(new Response('{"csrf_token": "t"}'));
  const [first, second] = await Promise.all([endSignIn({ code: "c" }), endSignIn({ code: "c" })]);
  expect(first).toBe(second);
  expect(sent.map(([url]) => url)).toEqual(["/v1/sign-in/oidc/callback", "/v1/sign-in/oidc/callback"]);
});
