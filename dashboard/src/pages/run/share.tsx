import { type FormEvent, useState } from "react";
import { get, post, remove } from "../../api/client";
import { useQuery } from "../../api/query";
import type { Job, List, NewShare, Share } from "../../api/types";
import { formatTime } from "../../format";
import { announce } from "../../ui/announcer";
import { Code, Dialog, Failure, Field, Pending, Time } from "../../ui/basics";
import { isOfThisMachine } from "./share-link";

const DAY_S = 24 * 3600;
const EXPIRIES = [1, 7, 30, 90];
const DEFAULT_DAYS = 7;

/** Makes read-only links to the report of a run, and revokes them. */
export function ShareButton({ job }: { job: Job }) {
  const [isOpen, setIsOpen] = useState(false);
  return (
    <>
      <button type="button" onClick={() => setIsOpen(true)}>
        Share
      </button>
      {isOpen && <ShareDialog path={`/v1/jobs/${job.id}/shares`} onClose={() => setIsOpen(false)} />}
    </>
  );
}

function ShareDialog({ path, onClose }: { path: string; onClose: () => void }) {
  const shares = useQuery(path, (signal) => get<List<Share>>(path, {}, signal));
  const [days, setDays] = useState(DEFAULT_DAYS);
  const [made, setMade] = useState<NewShare>();
  const [error, setError] = useState<Error>();
  const create = async (event: FormEvent) => {
    event.preventDefault();
    setError(undefined);
    try {
      setMade(await post<NewShare>(path, { expires_in_s: days * DAY_S }));
      announce("The link is ready.");
      shares.reload();
    } catch (caught) {
      setError(caught as Error);
    }
  };
  const revoke = async (share: Share) => {
    setError(undefined);
    try {
      await remove(`${path}/${share.id}`);
      if (share.id === made?.id) setMade(undefined);
      announce("The link is revoked.");
      shares.reload();
    } catch (caught) {
      setError(caught as Error);
    }
  };
  return (
    <Dialog title="Share this run" onClose={onClose}>
      <p>
        Anyone with the link can read this run's report without signing in: verdict, measurements, layers, configuration
        and sample outputs with their prompts. It opens no files, no log and no other run.
      </p>
      <form onSubmit={create}>
        <Field label="Link expires after">
          {(props) => (
            <select {...props} value={days} onChange={(event) => setDays(Number(event.target.value))}>
              {EXPIRIES.map((each) => (
                <option key={each} value={each}>
                  {each === 1 ? "1 day" : `${each} days`}
                </option>
              ))}
            </select>
          )}
        </Field>
        <div className="actions">
          <button type="submit" className="primary">
            Create link
          </button>
        </div>
      </form>
      {error && <Failure error={error} />}
      {made && (
        <>
          <p>Copy the link now: it will not be shown again.</p>
          <Code text={made.url} label="New link" />
          {isOfThisMachine(made.url) && (
            <div className="notice warn">
              ⚠ The link works on this machine only, since the service has no other address. To give it one, start it
              with <code>BITFOUNDRY_PUBLIC_URL</code>.
            </div>
          )}
        </>
      )}
      <Pending query={shares} />
      {shares.data && shares.data.data.length > 0 && <ShareTable shares={shares.data.data} onRevoke={revoke} />}
    </Dialog>
  );
}

function ShareTable({ shares, onRevoke }: { shares: Share[]; onRevoke: (share: Share) => void }) {
  return (
    <table>
      <caption>Active links</caption>
      <tbody>
        {shares.map((share) => (
          <tr key={share.id}>
            <td>
              Created <Time at={share.created_at} />
              {share.created_by && ` by ${share.created_by}`}
              <div className="sub">Expires {formatTime(share.expires_at)}</div>
            </td>
            <td>
              <button type="button" className="small danger" onClick={() => onRevoke(share)}>
                Revoke
              </button>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
