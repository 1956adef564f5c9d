import { createContext, type FormEvent, useCallback, useContext, useEffect, useState } from "react";
import { forgetAnswers, get, Problem, post, remove, setCsrfToken, Unreachable, whenSignedOut } from "./api/client";
import { queryClient } from "./api/query";
import type { Key, SignIn } from "./api/types";
import { Failure, Field } from "./ui/basics";

export interface Session {
  key: Key;
  can: (scope: Key["scopes"][number]) => boolean;
  signOut: () => Promise<void>;
}

const SessionContext = createContext<Session | null>(null);
export const SessionProvider = SessionContext.Provider;

export function useSession(): Session {
  const session = useContext(SessionContext);
  if (!session) throw new Error("useSession needs a SessionProvider above it");
  return session;
}

/** Read the key after the # of the link that `bitfoundry up` prints, and remove it. No server sees that part. */
export function takeKeyFromAddress(): string {
  const key = new URLSearchParams(window.location.hash.slice(1)).get("key") ?? "";
  if (key) window.history.replaceState(null, "", window.location.pathname + window.location.search);
  return key;
}

const keyOfLink = takeKeyFromAddress();

/** "ended": this browser was signed in, and its key or its sign-in is not valid any more. */
type Door = "unknown" | "closed" | "ended" | "unreachable" | SignIn;

/** The sign-in state of this browser, with functions to sign in and out. */
export function useSignIn() {
  const [door, setDoor] = useState<Door>("unknown");

  const enter = useCallback((signIn: SignIn) => {
    setCsrfToken(signIn.csrf_token);
    setDoor(signIn);
  }, []);
  const signIn = useCallback(
    async (key: string) => enter(await post<SignIn>("/v1/sign-in", { api_key: key })),
    [enter],
  );
  const restore = useCallback(async () => {
    try {
      if (keyOfLink) await signIn(keyOfLink);
      else enter(await get<SignIn>("/v1/sign-in"));
    } catch (error) {
      setDoor(error instanceof Unreachable ? "unreachable" : "closed");
    }
  }, [enter, signIn]);
  const close = useCallback((hasEnded: boolean) => {
    forgetAnswers();
    queryClient.clear();
    setDoor((before) => (hasEnded && typeof before === "object" ? "ended" : before === "ended" ? before : "closed"));
  }, []);
  const signOut = useCallback(() => remove("/v1/sign-in").then(() => close(false)), [close]);

  useEffect(() => {
    whenSignedOut(() => close(true));
    void restore();
  }, [restore, close]);

  useEffect(() => {
    // A sign-in link that is pasted into an open tab loads no page.
    const follow = () => {
      const key = takeKeyFromAddress();
      if (key)
        signIn(key).then(
          () => queryClient.clear(),
          () => close(true),
        );
    };
    window.addEventListener("hashchange", follow);
    return () => window.removeEventListener("hashchange", follow);
  }, [signIn, close]);

  useEffect(() => {
    if (door !== "unreachable") return;
    const timer = window.setTimeout(restore, 2000);
    return () => window.clearTimeout(timer);
  });

  return { door, signIn, signOut };
}

export function SignInPage({ signIn, hasEnded }: { signIn: (key: string) => Promise<void>; hasEnded: boolean }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState<Error>();
  const [busy, setBusy] = useState(false);

  useEffect(() => {
    document.title = "Sign in · Bitfoundry";
  }, []);

  const submit = async (event: FormEvent) => {
    event.preventDefault();
    setBusy(true);
    setError(undefined);
    try {
      await signIn(key.trim());
    } catch (caught) {
      setError(caught as Error);
      setBusy(false);
    }
  };
  const refused = error instanceof Problem && error.status === 401;
  return (
    <main className="sign-in">
      <form onSubmit={submit} className="card">
        <h1>Bitfoundry</h1>
        <p>Quantize language models. Every result is verified before it counts as done.</p>
        {hasEnded && <p role="status">You are signed out: the key or the sign-in is not valid any more.</p>}
        <Field
          label="API key"
          hint={
            <>
              Starts with <code>bf_</code>; shown when the server starts.
            </>
          }
          error={refused ? "This API key is not valid." : undefined}
        >
          {(props) => (
            <input
              {...props}
              type="password"
              autoComplete="current-password"
              required
              // biome-ignore lint/a11y/noAutofocus: the page has this one field
              autoFocus
              value={key}
              onChange={(event) => setKey(event.target.value)}
            />
          )}
        </Field>
        {error && !refused && <Failure error={error} />}
        <button type="submit" className="primary" disabled={busy}>
          Sign in
        </button>
      </form>
    </main>
  );
}
