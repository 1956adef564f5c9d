import { createLink } from "@tanstack/react-router";
import type { AnchorHTMLAttributes } from "react";

type Anchor = AnchorHTMLAttributes<HTMLAnchorElement> & { current?: boolean | "page" };

/** A link within the dashboard. The page says which is the current one, not the address: filters share their page's. */
export const Link = createLink(({ current, ...rest }: Anchor) => <a {...rest} aria-current={current || undefined} />);
