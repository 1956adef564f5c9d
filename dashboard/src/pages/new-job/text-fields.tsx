import { useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { DatasetPage } from "../../api/types";
import { capitalize } from "../../format";
import { Field } from "../../ui/basics";
import { UploadDialog } from "../dataset-upload";
import { withSource } from "./body";
import { type Props, Scoped, Value } from "./fields";

interface Of extends Props {
  of: "calibration" | "evaluation";
  label: string;
  /** The option without a source; `usualName` stands for it in the request of an existing job. */
  usual: string;
  usualName?: string;
  /** More sources, each with its text. */
  more?: [string, string][];
}

/** The source of a text: an uploaded dataset, a file on the server, a dataset on the Hub. */
export function TextFields({ of, label, usual, usualName, more = [], ...props }: Of) {
  const { body, onChange, errorAt } = props;
  const datasets = useQuery("datasets for jobs", (signal) => get<DatasetPage>("/v1/datasets", { limit: 100 }, signal));
  const [uploading, setUploading] = useState(false);
  const requested = body[of]?.source;
  const source = requested === usualName ? undefined : requested;
  const several = of === "calibration" ? body.calibration?.sources : undefined;
  const section = capitalize(of);
  const named = [
    ...more,
    ...(datasets.data?.data.map((each): [string, string] => [
      each.id,
      `${each.name} (${each.statistics.num_rows} rows)`,
    ]) ?? []),
  ];
  const isOther = source !== undefined && !named.some(([name]) => name === source);
  const choose = (name: string) => onChange(withSource(body, of, name === "other" ? "/" : name));
  return (
    <>
      <div className="row field">
        <Field label={label} error={errorAt(`/${of}/source`) ?? errorAt(`/${of}`)}>
          {(own) => (
            <select
              {...own}
              value={several ? "several" : isOther ? "other" : (source ?? "")}
              onChange={(event) => choose(event.target.value)}
            >
              {several && <option value="several">{several.length} sources, see JSON</option>}
              <option value="">{usual}</option>
              {named.map(([name, text]) => (
                <option key={name} value={name}>
                  {text}
                </option>
              ))}
              <option value="other">Path on the server or Hub dataset…</option>
            </select>
          )}
        </Field>
        <button type="button" onClick={() => setUploading(true)} aria-label={`Upload dataset for ${of}`}>
          Upload dataset
        </button>
      </div>
      {isOther && (
        <div className="fields">
          <Value {...props} pointer={`/${of}/source`} label={<Scoped to={section}>Path or Hub dataset</Scoped>} />
          <Value {...props} pointer={`/${of}/config`} label={<Scoped to={section}>Dataset config</Scoped>} />
          <Value {...props} pointer={`/${of}/split`} label={<Scoped to={section}>Split</Scoped>} placeholder="train" />
        </div>
      )}
      {uploading && (
        <UploadDialog
          onClose={() => setUploading(false)}
          onDone={(dataset) => {
            datasets.reload();
            onChange(withSource(body, of, dataset.id));
          }}
        />
      )}
    </>
  );
}
