import { Component, type ReactNode } from "react";
import { Title } from "./basics";

const NOT_LOADED = /dynamically imported module|module script failed/i;

/** Shows what went wrong in place of a page that could not be loaded, or that failed while it was drawn. */
export class PageBoundary extends Component<{ children: ReactNode }, { error?: Error }> {
  override state: { error?: Error } = {};

  static getDerivedStateFromError(error: Error) {
    return { error };
  }

  override render() {
    const { error } = this.state;
    if (!error) return this.props.children;
    const isNotLoaded = NOT_LOADED.test(error.message);
    return (
      <>
        <Title>{isNotLoaded ? "This page could not be loaded" : "This page failed"}</Title>
        <div className="notice bad" role="alert">
          <p>
            {isNotLoaded
              ? "The service does not respond, or it was upgraded since you opened the dashboard."
              : `This is a bug in the dashboard: ${error.message}`}
          </p>
          <button type="button" onClick={() => window.location.reload()}>
            Reload
          </button>
        </div>
      </>
    );
  }
}
