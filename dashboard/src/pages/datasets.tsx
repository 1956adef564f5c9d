import { getRouteApi } from "@tanstack/react-router";
import { useState } from "react";
import { get, remove } from "../api/client";
import { useQuery } from "../api/query";
import type { Dataset, DatasetPage } from "../api/types";
import { formatBytes, formatNumber } from "../format";
import { Link } from "../link";
import { useSession } from "../sign-in";
import { ActionsHead, Confirm, CopyButton, Dialog, Empty, Facts, Time, Title } from "../ui/basics";
import { Listing } from "../ui/table";
import { DatasetPreview, UploadDialog } from "./dataset-upload";

const route = getRouteApi("/datasets");

export default function Datasets() {
  const session = useSession();
  const { cursor } = route.useSearch();
  const query = useQuery(`datasets ${cursor}`, (signal) =>
    get<DatasetPage>("/v1/datasets", { limit: 50, cursor }, signal),
  );
  const [uploading, setUploading] = useState(false);
  const [shown, setShown] = useState<Dataset | null>(null);
  const [deleting, setDeleting] = useState<Dataset | null>(null);
  const mayWrite = session.can("jobs:write");
  return (
    <>
      <Title
        extra={
          mayWrite && (
            <button type="button" className="primary" onClick={() => setUploading(true)}>
              Upload dataset
            </button>
          )
        }
      >
        Datasets
      </Title>
      <Listing
        query={query}
        empty={<Empty>No datasets yet. Jobs without a dataset calibrate on the built-in mix.</Empty>}
        head={
          <>
            <th>Dataset</th>
            <th>Format</th>
            <th className="number">Rows</th>
            <th className="number">Size</th>
            <th>Text column</th>
            <th>Uploaded</th>
            <ActionsHead />
          </>
        }
        row={(dataset) => (
          <tr key={dataset.id}>
            <td>
              <button type="button" className="link" onClick={() => setShown(dataset)}>
                {dataset.name}
              </button>
              <div className="sub">{dataset.id}</div>
            </td>
            <td>{dataset.format}</td>
            <td className="number">{formatNumber(dataset.statistics.num_rows)}</td>
            <td className="number">{formatBytes(dataset.bytes)}</td>
            <td>
              <code>{dataset.column}</code>
            </td>
            <td>
              <Time at={dataset.created_at} />
            </td>
            <td className="row">
              <CopyButton text={dataset.id} label="Copy ID" />
              {mayWrite && (
                <button type="button" className="small danger" onClick={() => setDeleting(dataset)}>
                  Delete
                </button>
              )}
            </td>
          </tr>
        )}
      />
      {query.data?.next_cursor && (
        <Link to="/datasets" search={{ cursor: query.data.next_cursor }}>
          Older →
        </Link>
      )}
      {uploading && <UploadDialog onClose={() => setUploading(false)} onDone={query.reload} />}
      {shown && <DatasetDialog dataset={shown} onClose={() => setShown(null)} />}
      {deleting && (
        <Confirm
          title={`Delete ${deleting.name}?`}
          action="Delete dataset"
          onClose={() => setDeleting(null)}
          onConfirm={async () => {
            await remove(`/v1/datasets/${deleting.id}`);
            query.reload();
          }}
        >
          <p>The uploaded file is deleted as well. Jobs that have ended keep the dataset's ID.</p>
        </Confirm>
      )}
    </>
  );
}

function DatasetDialog({ dataset, onClose }: { dataset: Dataset; onClose: () => void }) {
  const { statistics } = dataset;
  return (
    <Dialog title={dataset.name} onClose={onClose}>
      <Facts
        facts={[
          ["Rows", formatNumber(statistics.num_rows)],
          ["Rows without text", formatNumber(statistics.num_empty)],
          ["Duplicates", formatNumber(statistics.num_duplicates)],
          ["Rows with chats", formatNumber(statistics.num_chats)],
          [
            "Characters per row",
            `${statistics.chars.min} to ${statistics.chars.max}, median ${statistics.chars.median}`,
          ],
          ["Columns", dataset.columns.join(", ")],
        ]}
      />
      <h3>Row lengths</h3>
      <Histogram bins={statistics.chars.histogram as { from: number; to: number; count: number }[]} />
      <DatasetPreview id={dataset.id} />
    </Dialog>
  );
}

function Histogram({ bins }: { bins: { from: number; to: number; count: number }[] }) {
  const most = Math.max(1, ...bins.map((bin) => bin.count));
  return (
    <table>
      <thead>
        <tr>
          <th>Characters</th>
          <th className="number">Rows</th>
          <th>
            <span className="hidden">Share</span>
          </th>
        </tr>
      </thead>
      <tbody>
        {bins.map((bin) => (
          <tr key={bin.from}>
            <td className="nowrap">
              {formatNumber(bin.from)} to {formatNumber(bin.to)}
            </td>
            <td className="number">{formatNumber(bin.count)}</td>
            <td style={{ width: "50%" }}>
              <div className="bar" aria-hidden="true">
                <div style={{ width: `${(100 * bin.count) / most}%` }} />
              </div>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
