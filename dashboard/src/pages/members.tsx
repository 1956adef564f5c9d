import { type FormEvent, useState } from "react";
import { get, post, remove, request } from "../api/client";
import { useQuery } from "../api/query";
import type { List, Member, NewKey, NewMember } from "../api/types";
import { useSession } from "../sign-in";
import { announce } from "../ui/announcer";
import { ActionsHead, Confirm, Dialog, Empty, Failure, Field, Time, Title } from "../ui/basics";
import { Listing } from "../ui/table";
import { ExpiryField, expiryOf, NewKeyShown } from "./new-key";

type Role = Member["role"];

const ROLES: Record<Role, { text: string; what: string }> = {
  viewer: { text: "Viewer", what: "Can view jobs, preview plans and download artifacts." },
  editor: { text: "Editor", what: "Can also submit, change and delete jobs, and chat with their results." },
  admin: { text: "Admin", what: "Can also manage the project: members, keys, tokens, webhooks and audit log." },
};

export default function Members() {
  const query = useQuery("members", (signal) => get<List<Member>>("/v1/members", {}, signal));
  const [adding, setAdding] = useState(false);
  const [made, setMade] = useState<NewKey | null>(null);
  const [asking, setAsking] = useState<{ member: Member; role?: Role } | null>(null);
  const session = useSession();
  const isSelf = (member: Member) => member.id === session.key.member?.id;
  const act = async (member: Member, role?: Role) => {
    const place = `/v1/members/${member.id}`;
    if (role) await request("PATCH", place, { body: { role } });
    else await remove(place);
    announce(role ? `The role of ${member.name} is now ${ROLES[role].text}.` : `${member.name} was removed.`);
    // every page depends on what the key permits
    if (isSelf(member)) window.location.reload();
    else query.reload();
  };
  return (
    <>
      <Title
        extra={
          <button type="button" className="primary" onClick={() => setAdding(true)}>
            Add member
          </button>
        }
      >
        Members
      </Title>
      <Listing
        query={query}
        empty={<Empty>No members yet. A member is a person who signs in with a key of their own.</Empty>}
        head={
          <>
            <th>Name</th>
            <th>Role</th>
            <th>Valid keys</th>
            <th>Last used</th>
            <th>Added</th>
            <ActionsHead />
          </>
        }
        row={(member) => (
          <tr key={member.id}>
            <td>
              <strong>{member.name}</strong> {isSelf(member) && <span className="faint">you</span>}
            </td>
            <td>
              <RoleChoice
                aria-label={`Role of ${member.name}`}
                role={member.role}
                onChoose={(role) => setAsking({ member, role })}
              />
            </td>
            <td>{member.num_keys}</td>
            <td>
              <Time at={member.last_used_at} />
            </td>
            <td>
              <Time at={member.created_at} />
            </td>
            <td>
              <button type="button" className="small danger" onClick={() => setAsking({ member })}>
                Remove
              </button>
            </td>
          </tr>
        )}
      />
      {adding && (
        <NewMemberDialog
          onClose={() => setAdding(false)}
          onMade={(member) => {
            setAdding(false);
            setMade(member.first_key);
            query.reload();
          }}
        />
      )}
      {made && <NewKeyShown made={made} onClose={() => setMade(null)} />}
      {asking && (
        <Confirm
          title={asking.role ? `Change the role of ${asking.member.name}?` : `Remove ${asking.member.name}?`}
          action={asking.role ? "Change role" : "Remove member"}
          onClose={() => setAsking(null)}
          onConfirm={() => act(asking.member, asking.role)}
        >
          <p>
            {asking.role
              ? `${ROLES[asking.role].text}: ${ROLES[asking.role].what} This applies to the member's keys at once.`
              : "The member's keys stop working at once. This cannot be undone. Runs and audit entries stay."}
          </p>
          {isSelf(asking.member) && <p>⚠ You are signed in as this member.</p>}
        </Confirm>
      )}
    </>
  );
}

function RoleChoice({
  role,
  onChoose,
  ...props
}: {
  role: Role;
  onChoose: (role: Role) => void;
  id?: string;
  "aria-label"?: string;
}) {
  return (
    <select {...props} value={role} onChange={(event) => onChoose(event.target.value as Role)}>
      {Object.entries(ROLES).map(([each, { text }]) => (
        <option key={each} value={each}>
          {text}
        </option>
      ))}
    </select>
  );
}

function NewMemberDialog({ onClose, onMade }: { onClose: () => void; onMade: (member: NewMember) => void }) {
  const [name, setName] = useState("");
  const [role, setRole] = useState<Role>("viewer");
  const [until, setUntil] = useState("");
  const [error, setError] = useState<Error>();
  const submit = async (event: FormEvent) => {
    event.preventDefault();
    try {
      onMade(await post<NewMember>("/v1/members", { name, role, ...expiryOf(until) }));
    } catch (caught) {
      setError(caught as Error);
    }
  };
  return (
    <Dialog title="Add member" onClose={onClose}>
      <form onSubmit={submit}>
        <Field label="Name" hint="The person who signs in with the key that you get next.">
          {(props) => <input {...props} required value={name} onChange={(event) => setName(event.target.value)} />}
        </Field>
        <Field label="Role" hint={ROLES[role].what}>
          {(props) => <RoleChoice {...props} role={role} onChoose={setRole} />}
        </Field>
        <ExpiryField until={until} onChange={setUntil} />
        {error && <Failure error={error} />}
        <div className="actions">
          <button type="submit" className="primary" disabled={!name}>
            Add member
          </button>
        </div>
      </form>
    </Dialog>
  );
}
