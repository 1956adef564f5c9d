import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { HubToken, List, Target } from "../api/types";
import { Field } from "../ui/basics";

export const HUB_TARGET: Target = { repo_id: "", private: true };

interface Props {
  target: Target;
  onChange: (target: Target) => void;
  errorAt?: (name: string) => string | undefined;
}

export function TargetFields({ target, onChange, errorAt = () => undefined }: Props) {
  const tokens = useQuery("hub-tokens", (signal) => get<List<HubToken>>("/v1/hub-tokens", {}, signal));
  const isUrl = target.to !== undefined;
  const set = (name: keyof Target, value: string | boolean) => {
    const { [name]: _, ...rest } = target;
    onChange(value === "" || value === false ? rest : { ...rest, [name]: value });
  };
  return (
    <>
      <div className="choices field">
        <label>
          <input type="radio" name="target" checked={!isUrl} onChange={() => onChange(HUB_TARGET)} /> Hub repository
        </label>
        <label>
          <input type="radio" name="target" checked={isUrl} onChange={() => onChange({ to: "" })} /> Storage URL
        </label>
      </div>
      {isUrl ? (
        <>
          <Field label="URL" hint="Must be allowed by the operator." error={errorAt("to")}>
            {(props) => (
              <input
                {...props}
                required
                placeholder="s3://bucket/models/name"
                value={target.to}
                onChange={(event) => onChange({ ...target, to: event.target.value.trim() })}
              />
            )}
          </Field>
          <div className="choices">
            <label>
              <input
                type="checkbox"
                checked={target.replace ?? false}
                onChange={(event) => set("replace", event.target.checked)}
              />{" "}
              Replace another artifact in this folder
            </label>
          </div>
        </>
      ) : (
        <>
          <Field label="Repository" error={errorAt("repo_id")}>
            {(props) => (
              <input
                {...props}
                required
                placeholder="org/name"
                value={target.repo_id ?? ""}
                onChange={(event) => onChange({ ...target, repo_id: event.target.value.trim() })}
              />
            )}
          </Field>
          <div className="fields">
            <Field label="Branch" error={errorAt("revision")}>
              {(props) => (
                <input
                  {...props}
                  placeholder="main"
                  value={target.revision ?? ""}
                  onChange={(event) => set("revision", event.target.value.trim())}
                />
              )}
            </Field>
            <Field label="Write token" hint="A Hub token of the project." error={errorAt("hub_token")}>
              {(props) => (
                <select
                  {...props}
                  value={target.hub_token ?? ""}
                  onChange={(event) => set("hub_token", event.target.value)}
                >
                  <option value="">Job's token</option>
                  {tokens.data?.data.map((each) => (
                    <option key={each.name}>{each.name}</option>
                  ))}
                </select>
              )}
            </Field>
          </div>
          <div className="choices">
            <label>
              <input
                type="checkbox"
                checked={target.private ?? false}
                onChange={(event) => set("private", event.target.checked)}
              />{" "}
              Create as private
            </label>
            <label>
              <input
                type="checkbox"
                checked={target.create_pr ?? false}
                onChange={(event) => set("create_pr", event.target.checked)}
              />{" "}
              Open a pull request
            </label>
          </div>
        </>
      )}
      <div className="choices">
        <label>
          <input
            type="checkbox"
            checked={target.force ?? false}
            onChange={(event) => set("force", event.target.checked)}
          />{" "}
          Publish also if the verdict is degraded or broken, or the goal was missed
        </label>
      </div>
    </>
  );
}
