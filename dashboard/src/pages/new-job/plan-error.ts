// What the parts of an error say beyond its message and hint.
import type { Problem } from "../../api/client";

/** The entries of an error that say more than its message and its hint: another fault, or values that are allowed. */
export function entriesToAdd({ message, hint, errors }: Pick<Problem, "message" | "hint" | "errors">) {
  const said = `${message} ${hint}`;
  return errors.filter(({ detail, allowed }) => {
    const listed = Array.isArray(allowed) ? allowed : [];
    return !said.includes(String(detail)) || !listed.every((value) => said.includes(String(value)));
  });
}
