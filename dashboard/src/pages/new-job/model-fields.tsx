import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { HubToken, List, ModelFolders } from "../../api/types";
import { formatBytes, shortName } from "../../format";
import { Field } from "../../ui/basics";
import { withValue } from "./body";
import { Choice, type Props, Value } from "./fields";
import { Inspect } from "./inspect";

/** The model: one that the server was seen to have, another path there, or a repository of the Hub. */
export function ModelFields(props: Props) {
  const { body, onChange, errorAt } = props;
  const isHub = body.model.id !== undefined;
  const tokens = useQuery(isHub ? "hub-tokens" : null, (signal) => get<List<HubToken>>("/v1/hub-tokens", {}, signal));
  return (
    <fieldset>
      <legend>Model</legend>
      <div className="choices field">
        <label>
          <input
            type="radio"
            name="where"
            checked={!isHub}
            onChange={() => onChange({ ...body, model: { path: "" } })}
          />{" "}
          Local path
        </label>
        <label>
          <input type="radio" name="where" checked={isHub} onChange={() => onChange({ ...body, model: { id: "" } })} />{" "}
          Hugging Face Hub or object store
        </label>
      </div>
      {isHub ? (
        <div className="fields">
          <Field label="Repository or URL" error={errorAt("/model/id") ?? errorAt("/model")}>
            {(own) => (
              <input
                {...own}
                placeholder="org/name or s3://bucket/folder"
                value={body.model.id}
                onChange={(event) => onChange({ ...body, model: { ...body.model, id: event.target.value.trim() } })}
              />
            )}
          </Field>
          <Value {...props} pointer="/model/revision" label="Revision" placeholder="main" />
          <Field label="Access token" hint="For private and gated models." error={errorAt("/model/hub_token")}>
            {(own) => (
              <select
                {...own}
                value={body.model.hub_token ?? ""}
                onChange={(event) => onChange(withValue(body, "/model/hub_token", event.target.value))}
              >
                <option value="">None</option>
                {tokens.data?.data.map((token) => (
                  <option key={token.name}>{token.name}</option>
                ))}
              </select>
            )}
          </Field>
        </div>
      ) : (
        <>
          <Folders {...props} />
          <Field
            label="Path on the server"
            error={errorAt("/model/path") ?? errorAt("/model")}
            hint="Inside an allowed model folder."
          >
            {(own) => (
              <input
                {...own}
                placeholder="/models/SmolLM2-135M-Instruct"
                value={body.model.path ?? ""}
                onChange={(event) => onChange({ ...body, model: { path: event.target.value.trim() } })}
              />
            )}
          </Field>
        </>
      )}
      <Inspect model={body.model} />
    </fieldset>
  );
}

/** The models that were found on the server, to choose one without knowing its path. */
function Folders({ body, onChange }: Props) {
  const found = useQuery("model-folders", (signal) => get<ModelFolders>("/v1/models/folders", {}, signal));
  const folders = found.data?.data ?? [];
  if (!folders.length) return null;
  const names = folders.map(({ path }) => shortName(path));
  const isUnique = (name: string) => names.filter((each) => each === name).length === 1;
  const texts = folders.map(({ path, size_bytes }) => {
    const name = isUnique(shortName(path)) ? shortName(path) : path;
    return [path, `${name} (${formatBytes(size_bytes)})`];
  });
  const isOther = !folders.some(({ path }) => path === body.model.path);
  return (
    <Choice
      label="Models on the server"
      hint={found.data?.is_complete ? undefined : "Not all folders were searched. Name other models by their path."}
      value={isOther ? "" : (body.model.path ?? "")}
      texts={{ "": isOther && body.model.path ? "Another path" : "Choose a model", ...Object.fromEntries(texts) }}
      onChoose={(path) => onChange({ ...body, model: { path } })}
    />
  );
}
