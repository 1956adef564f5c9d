import { RouterProvider } from "@tanstack/react-router";
import { useMemo } from "react";
import { router } from "./router";
import { SessionProvider, SignInPage, useSignIn } from "./sign-in";
import { Loading } from "./ui/basics";

export function App() {
  const { door, failure, signIn, signOut } = useSignIn();
  const session = useMemo(
    () =>
      typeof door === "object"
        ? {
            key: door.key,
            projects: door.projects,
            can: (scope: string) => door.key.scopes.includes(scope),
            signOut,
          }
        : null,
    [door, signOut],
  );
  if (door === "unknown") return <Loading />;
  if (door === "unreachable") return <Loading what="The service is not responding. Retrying" />;
  if (!session) return <SignInPage signIn={signIn} hasEnded={door === "ended"} failure={failure} />;
  return (
    <SessionProvider value={session}>
      <RouterProvider router={router} />
    </SessionProvider>
  );
}
