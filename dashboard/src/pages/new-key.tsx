import type { NewKey } from "../api/types";
import { Code, Dialog, Field } from "../ui/basics";

/** The end of a new key, as the local time of its field; "" for a key without one. */
export function ExpiryField({ until, onChange }: { until: string; onChange: (until: string) => void }) {
  return (
    <Field label="Expires" hint="Leave empty for a key that does not expire.">
      {(props) => (
        <input {...props} type="datetime-local" value={until} onChange={(event) => onChange(event.target.value)} />
      )}
    </Field>
  );
}

/** The part of a request's body for what `ExpiryField` holds. */
export const expiryOf = (until: string) => (until ? { expires_at: new Date(until).toISOString() } : {});

/** Shows a new key, once. */
export function NewKeyShown({ made, onClose }: { made: NewKey; onClose: () => void }) {
  return (
    <Dialog title={made.name} onClose={onClose}>
      <p>Copy this key now. It will not be shown again.</p>
      {made.member && <p>{made.member.name} signs in with it.</p>}
      <Code text={made.key} label="New API key" />
    </Dialog>
  );
}
