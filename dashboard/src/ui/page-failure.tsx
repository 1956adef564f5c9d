import { Title } from "./basics";

const NOT_LOADED = /dynamically imported module|module script failed/i;

/** What went wrong, in place of a page that could not be loaded, or that failed while it was drawn. */
export function PageFailure({ error }: { error: unknown }) {
  const message = error instanceof Error ? error.message : String(error);
  const isNotLoaded = NOT_LOADED.test(message);
  return (
    <>
      <Title>{isNotLoaded ? "This page could not be loaded" : "This page failed"}</Title>
      <div className="notice bad" role="alert">
        <p>
          {isNotLoaded
            ? "The service is not responding, or it was upgraded since you opened the dashboard."
            : `This is a bug in the dashboard: ${message}`}
        </p>
        <button type="button" onClick={() => window.location.reload()}>
          Reload
        </button>
      </div>
    </>
  );
}
