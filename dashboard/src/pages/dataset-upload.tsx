import { type FormEvent, useState } from "react";
import { get, post, request } from "../api/client";
import { useQuery } from "../api/query";
import type { Dataset, Preview, Upload } from "../api/types";
import { formatBytes } from "../format";
import { COLUMN_PLACEHOLDER } from "../labels";
import { Bar, Dialog, Failure, Field, Loading } from "../ui/basics";
import { Table } from "../ui/table";

const MAX_SINGLE_REQUEST_BYTES = 15 << 20; // what one request may carry, with room for the form around it
const PART_BYTES = 16 << 20;

type OnProgress = (bytes: number) => void;

/** Upload a small file in one request, a large one in parts, each with its hash. */
async function upload(file: File, name: string, column: string, onProgress: OnProgress): Promise<Dataset> {
  if (file.size <= MAX_SINGLE_REQUEST_BYTES) {
    const form = new FormData();
    form.append("file", file);
    if (name) form.append("name", name);
    if (column) form.append("column", column);
    return request<Dataset>("POST", "/v1/datasets", { form });
  }
  return uploadInParts(file, name, column, onProgress);
}

async function uploadInParts(file: File, name: string, column: string, onProgress: OnProgress): Promise<Dataset> {
  const { sha256 } = await import("@noble/hashes/sha2.js");
  const hex = (bytes: Uint8Array) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  const begun = await post<Upload>("/v1/uploads", {
    filename: file.name,
    ...(name && { name }),
    ...(column && { column }),
  });
  const whole = sha256.create();
  for (let start = 0, number = 1; start < file.size; start += PART_BYTES, number += 1) {
    const part = file.slice(start, start + PART_BYTES);
    const bytes = new Uint8Array(await part.arrayBuffer());
    whole.update(bytes);
    await request("PUT", `/v1/uploads/${begun.id}/parts/${number}`, {
      raw: part,
      query: { sha256: hex(sha256(bytes)) },
    });
    onProgress(start + bytes.length);
  }
  return post<Dataset>(`/v1/uploads/${begun.id}/complete`, { sha256: hex(whole.digest()) });
}

export function UploadDialog({ onClose, onDone }: { onClose: () => void; onDone: (dataset: Dataset) => void }) {
  const [file, setFile] = useState<File | null>(null);
  const [name, setName] = useState("");
  const [column, setColumn] = useState("");
  const [done, setDone] = useState<number | null>(null);
  const [error, setError] = useState<Error>();
  const [dataset, setDataset] = useState<Dataset>();

  const submit = async (event: FormEvent) => {
    event.preventDefault();
    if (!file) return;
    setError(undefined);
    setDone(0);
    try {
      const uploaded = await upload(file, name, column, setDone);
      setDataset(uploaded);
      onDone(uploaded);
    } catch (caught) {
      setError(caught as Error);
    }
    setDone(null);
  };
  if (dataset) {
    return (
      <Dialog title={dataset.name} onClose={onClose}>
        <p>
          ✓ {dataset.statistics.num_rows} rows, {formatBytes(dataset.bytes)}, text column <code>{dataset.column}</code>.
        </p>
        <DatasetPreview id={dataset.id} />
        <div className="actions">
          <button type="button" className="primary" onClick={onClose}>
            Done
          </button>
        </div>
      </Dialog>
    );
  }
  return (
    <Dialog title="Upload dataset" onClose={onClose}>
      <form onSubmit={submit}>
        <Field label="File" hint=".jsonl, .json, .csv, .parquet or .txt, optionally compressed as .gz">
          {(props) => (
            <input {...props} type="file" required onChange={(event) => setFile(event.target.files?.[0] ?? null)} />
          )}
        </Field>
        <div className="fields">
          <Field label="Name">
            {(props) => (
              <input
                {...props}
                value={name}
                placeholder={file?.name}
                onChange={(event) => setName(event.target.value)}
              />
            )}
          </Field>
          <Field label="Text column" hint="The column with the text or the chat messages.">
            {(props) => (
              <input
                {...props}
                value={column}
                placeholder={COLUMN_PLACEHOLDER}
                onChange={(event) => setColumn(event.target.value)}
              />
            )}
          </Field>
        </div>
        {error && <Failure error={error} />}
        {done !== null && file && <Bar done={done} total={file.size} label="Upload progress" />}
        <div className="actions">
          <button type="submit" className="primary" disabled={!file || done !== null}>
            {done === null ? "Upload" : "Uploading and checking rows…"}
          </button>
        </div>
      </form>
    </Dialog>
  );
}

export function DatasetPreview({ id }: { id: string }) {
  const query = useQuery(`preview ${id}`, (signal) => get<Preview>(`/v1/datasets/${id}/preview`, { rows: 5 }, signal));
  if (query.error) return <Failure error={query.error} retry={query.reload} />;
  if (!query.data) return <Loading />;
  return (
    <Table caption="First rows">
      {query.data.rows.map((row) => (
        <tr key={row.place}>
          <th scope="row" className="nowrap">
            {row.place}
          </th>
          <td>
            {Object.entries(row.values).map(([column, value]) => (
              <div key={column}>
                <span className="faint">{column}</span> {typeof value === "string" ? value : JSON.stringify(value)}
              </div>
            ))}
          </td>
        </tr>
      ))}
    </Table>
  );
}
