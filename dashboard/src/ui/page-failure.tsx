import { useEffect, useRef, useSyncExternalStore } from "react";
import { connection } from "../api/connection";
import { Title } from "./basics";

const NOT_LOADED = /dynamically imported module|module script failed/i;

/** What went wrong, in place of a page that could not be loaded, or that failed while it was drawn. */
export function PageFailure({ error }: { error: unknown }) {
  const message = error instanceof Error ? error.message : String(error);
  if (NOT_LOADED.test(message)) return <NotLoaded />;
  return (
    <>
      <Title>This page failed</Title>
      <div className="notice bad" role="alert">
        <p>This is a bug in the dashboard: {message}</p>
        <Reload />
      </div>
    </>
  );
}

/** While the service is away, the notice of the shell says so, and the page loads by itself when it is back. */
function NotLoaded() {
  const isLost = useSyncExternalStore(connection.subscribe, connection.isLost);
  const wasLost = useRef(isLost);
  useEffect(() => {
    if (wasLost.current && !isLost) window.location.reload();
    wasLost.current = isLost;
  }, [isLost]);
  return (
    <>
      <Title>This page could not be loaded</Title>
      {isLost ? (
        <p className="sub">It opens as soon as the service responds again.</p>
      ) : (
        <div className="notice bad" role="alert">
          <p>The service did not answer, or it was upgraded since you opened the dashboard.</p>
          <Reload />
        </div>
      )}
    </>
  );
}

function Reload() {
  return (
    <button type="button" onClick={() => window.location.reload()}>
      Reload
    </button>
  );
}
