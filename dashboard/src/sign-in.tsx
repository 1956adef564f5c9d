import { createContext, type FormEvent, useCallback, useContext, useEffect, useState } from "react";
import { forgetAnswers, get, Problem, post, remove, setCsrfToken, Unreachable, whenSignedOut } from "./api/client";
import { queryClient } from "./api/query";
import type { Key, Oidc, SignIn } from "./api/types";
import { endSignIn, leave, takeReturn } from "./oidc";
import { Failure, Field } from "./ui/basics";

export interface Session {
  key: Key;
  /** Those that this sign-in can change to, with its own. */
  projects: SignIn["projects"];
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
const returned = takeReturn();

/** "ended": this browser was signed in, and its key or its sign-in is not valid any more. */
type Door = "unknown" | "closed" | "ended" | "unreachable" | SignIn;

/** The sign-in state of this browser, with functions to sign in and out. */
export function useSignIn() {
  const [door, setDoor] = useState<Door>("unknown");
  const [failure, setFailure] = useState<Error>();

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
      else enter(await (returned ? endSignIn(returned) : get<SignIn>("/v1/sign-in")));
    } catch (error) {
      if (returned) setFailure(error as Error);
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

  return { door, failure, signIn, signOut };
}

/** `failure`: of a sign-in through the OpenID provider that the browser came back from. */
export function SignInPage(props: { signIn: (key: string) => Promise<void>; hasEnded: boolean; failure?: Error }) {
  const { signIn, hasEnded, failure } = props;
  const [key, setKey] = useState("");
  const [error, setError] = useState(failure);
  const [busy, setBusy] = useState(false);
  const [provider, setProvider] = useState<string | null>(null);

  useEffect(() => {
    document.title = "Sign in · Bitfoundry";
    get<Oidc>("/v1/sign-in/oidc").then(
      ({ name }) => setProvider(name),
      () => {}, // a key still works
    );
  }, []);

  const attempt = async (what: () => Promise<void>) => {
    setBusy(true);
    setError(undefined);
    try {
      await what();
    } catch (caught) {
      setError(caught as Error);
      setBusy(false);
    }
  };
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void attempt(() => signIn(key.trim()));
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
        {provider && (
          <button type="button" disabled={busy} onClick={() => void attempt(leave)}>
            Sign in with {provider}
          </button>
        )}
      </form>
    </main>
  );
}
