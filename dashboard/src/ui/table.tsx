import type { ReactNode } from "react";
import type { Query } from "../api/query";
import { Pending, scrollable } from "./basics";

/** A table that scrolls where it is wider than the page. `head` are the cells of its heading, `children` its rows. */
export function Table({
  head,
  caption,
  className,
  children,
}: {
  head?: ReactNode;
  caption?: ReactNode;
  className?: string;
  children: ReactNode;
}) {
  return (
    <div className="table" ref={scrollable}>
      <table className={className}>
        {caption && <caption>{caption}</caption>}
        {head && (
          <thead>
            <tr>{head}</tr>
          </thead>
        )}
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

/** What the service lists: a table with a `row` for each item, or `empty` if there is none. */
export function Listing<Item>({
  query,
  empty,
  head,
  row,
}: {
  query: Query<{ data: Item[] }>;
  empty: ReactNode;
  head: ReactNode;
  row: (item: Item) => ReactNode;
}) {
  if (!query.data) return <Pending query={query} />;
  if (query.data.data.length === 0) return empty;
  return <Table head={head}>{query.data.data.map(row)}</Table>;
}

/** The links between the pages of a list: `back` to its first page, and to the `next` one. */
export function Pages({ back, next }: { back: ReactNode; next: ReactNode }) {
  return (
    <div className="row spread">
      {back || <span />}
      {next}
    </div>
  );
}
