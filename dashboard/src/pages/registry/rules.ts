// What a person may do with a request, and how versions and requests read as text.
import type { Actor, AliasRequest, Key } from "../../api/types";

type Person = Pick<Key, "id" | "member" | "scopes">;

/** What the person may do with a pending request; `why` says why they can neither approve nor refuse it. */
export interface Allowed {
  decide: boolean;
  withdraw: boolean;
  why?: string;
}

const OWN = "Another admin decides it. Nobody else here? bitfoundry registry protect --none lets you move it yourself.";

export function allowedFor(request: AliasRequest, person: Person): Allowed {
  const asker = request.asked_by;
  const isOwn = asker?.key_id === person.id || (person.member != null && asker?.member?.id === person.member.id);
  if (isOwn) return { decide: false, withdraw: person.scopes.includes("jobs:write"), why: OWN };
  if (!person.scopes.includes("admin")) return { decide: false, withdraw: false, why: "An admin decides it." };
  if (!person.member)
    return {
      decide: false,
      withdraw: false,
      why: "Sign in with the key of a member to decide it. This is a program's.",
    };
  return { decide: true, withdraw: false };
}

export const actorText = (actor: Actor | null) => (actor ? (actor.member?.name ?? actor.name) : "–");

/** How a request moves its alias, in words. */
export function changeText({ from_version: from, to_version: to }: AliasRequest): string {
  if (to === null) return `remove (now version ${from})`;
  return from === null ? `new → version ${to}` : `version ${from} → ${to}`;
}

/** The suggestion for the name of a registered model: that of the run in the letters of the registry. */
export function nameFor(text: string): string {
  const name = text.toLowerCase().replace(/[^a-z0-9._-]+/g, "-");
  return name.replace(/^[^a-z0-9]+|-+$/g, "").slice(0, 63);
}

export const MODEL_NAME = "[a-z0-9][a-z0-9._\\-]{0,62}";
export const ALIAS = "[a-z][a-z0-9\\-]{0,62}";
