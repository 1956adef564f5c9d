import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { HubToken, List } from "../api/types";
import { Field } from "../ui/basics";

/** Where an artifact shall go: a repository on the Hub, or `to` a URL. */
export interface Target {
  repo_id?: string;
  private?: boolean;
  revision?: string;
  create_pr?: boolean;
  commit_message?: string;
  path_in_repo?: string;
  hub_token?: string;
  to?: string;
}

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
          <input type="radio" name="target" checked={!isUrl} onChange={() => onChange(HUB_TARGET)} /> Hugging Face Hub
        </label>
        <label>
          <input type="radio" name="target" checked={isUrl} onChange={() => onChange({ to: "" })} /> A folder behind a
          URL
        </label>
      </div>
      {isUrl ? (
        <Field label="URL" hint="One that the operator allows." error={errorAt("to")}>
          {(props) => (
            <input
              {...props}
              required
              placeholder="s3://bucket/models/name"
              value={target.to}
              onChange={(event) => onChange({ to: event.target.value.trim() })}
            />
          )}
        </Field>
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
            <Field label="Token to write with" hint="One that the project keeps." error={errorAt("hub_token")}>
              {(props) => (
                <select
                  {...props}
                  value={target.hub_token ?? ""}
                  onChange={(event) => set("hub_token", event.target.value)}
                >
                  <option value="">the job's</option>
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
              Private, if it is made
            </label>
            <label>
              <input
                type="checkbox"
                checked={target.create_pr ?? false}
                onChange={(event) => set("create_pr", event.target.checked)}
              />{" "}
              As a pull request
            </label>
          </div>
        </>
      )}
    </>
  );
}
