// Sign-in through an OpenID provider. The browser goes to the provider, which sends it back to PAGE with a code; the
// service turns the code into a sign-in. Where the person was before is kept in this tab alone.
import { post, Unreachable } from "./api/client";
import type { OidcStart, SignIn } from "./api/types";

const PAGE = `${import.meta.env.BASE_URL}sign-in`;
const BEFORE = "bitfoundry-before-sign-in";
const NAMES = ["state", "code", "iss", "error"] as const;

/** What the provider added to the address. */
export type Return = Partial<Record<(typeof NAMES)[number], string>>;

/** Read what the provider added to the address, and show the address from before the sign-in again. */
export function takeReturn(): Return | null {
  if (window.location.pathname !== PAGE) return null;
  const query = new URLSearchParams(window.location.search);
  const before = sessionStorage.getItem(BEFORE) ?? import.meta.env.BASE_URL;
  sessionStorage.removeItem(BEFORE);
  window.history.replaceState(null, "", before);
  if (!query.has("state")) return null;
  return Object.fromEntries(NAMES.flatMap((name) => (query.has(name) ? [[name, query.get(name)]] : [])));
}

/** Go to the provider. */
export async function leave(): Promise<void> {
  const { authorization_url } = await post<OidcStart>("/v1/sign-in/oidc");
  sessionStorage.setItem(BEFORE, window.location.pathname + window.location.search);
  window.location.assign(authorization_url);
}

let ending: Promise<SignIn> | undefined;

/** End the sign-in that the browser came back from. A code works once, so this asks once, unless nobody answers. */
export function endSignIn(returned: Return): Promise<SignIn> {
  ending ??= post<SignIn>("/v1/sign-in/oidc/callback", returned).catch((error: unknown) => {
    if (error instanceof Unreachable) ending = undefined;
    throw error;
  });
  return ending;
}
