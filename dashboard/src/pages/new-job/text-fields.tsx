import { useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { DatasetPage } from "../../api/types";
import { Field } from "../../ui/basics";
import { UploadDialog } from "../dataset-upload";
import { withSource } from "./body";
import { type Props, Value } from "./fields";

interface Of extends Props {
  of: "calibration" | "evaluation";
  label: string;
  /** What it is that needs no source; `usualName`: what stands for that in the request of a job that is there. */
  usual: string;
  usualName?: string;
  /** What else can be chosen by name, with its text. */
  more?: [string, string][];
}

/** Where a text is: an uploaded dataset, a file of the service, a dataset on the Hub. */
export function TextFields({ of, label, usual, usualName, more = [], ...props }: Of) {
  const { body, onChange, errorAt } = props;
  const datasets = useQuery("datasets for jobs", (signal) => get<DatasetPage>("/v1/datasets", { limit: 100 }, signal));
  const [uploading, setUploading] = useState(false);
  const given = body[of]?.source;
  const source = given === usualName ? undefined : given;
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
              value={isOther ? "other" : (source ?? "")}
              onChange={(event) => choose(event.target.value)}
            >
              <option value="">{usual}</option>
              {named.map(([name, text]) => (
                <option key={name} value={name}>
                  {text}
                </option>
              ))}
              <option value="other">A file of the service, or the Hub …</option>
            </select>
          )}
        </Field>
        <button type="button" onClick={() => setUploading(true)}>
          Upload a dataset
        </button>
      </div>
      {isOther && (
        <div className="fields">
          <Value {...props} pointer={`/${of}/source`} label="Path or name on the Hub" />
          <Value {...props} pointer={`/${of}/config`} label="Config of the dataset" />
          <Value {...props} pointer={`/${of}/split`} label="Split" placeholder="train" />
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
