import type { ReactNode } from "react";

/** A component in one state, with its name. `data-part` is what the test measures. `isNarrow`: in 18 rem. */
export function Part({ name, isNarrow = false, children }: { name: string; isNarrow?: boolean; children: ReactNode }) {
  return (
    <section className="card" aria-label={name}>
      <h2>{name}</h2>
      <div data-part={name} style={isNarrow ? { maxWidth: "18rem" } : undefined}>
        {children}
      </div>
    </section>
  );
}
