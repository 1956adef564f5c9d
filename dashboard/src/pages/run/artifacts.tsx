import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { ArtifactFile, Job, List } from "../../api/types";
import { formatBytes, plural } from "../../format";
import { CopyButton, Empty, Failure, Loading } from "../../ui/basics";
import { FINAL_STATES } from "../../ui/states";
import { Table } from "../../ui/table";
import { Publish } from "./publish";
import { UseIt } from "./use-it";

export function Artifacts({ job }: { job: Job }) {
  const files = useQuery(job.artifact ? `files ${job.id}` : null, (signal) =>
    get<List<ArtifactFile>>(`/v1/jobs/${job.id}/artifacts`, {}, signal),
  );
  if (!job.artifact) {
    return (
      <Empty>
        {FINAL_STATES.has(job.state) ? "This run has no artifact." : "Files appear when verification passes."}
      </Empty>
    );
  }
  if (files.error) return <Failure error={files.error} retry={files.reload} />;
  if (!files.data) return <Loading />;
  return (
    <>
      <UseIt job={job} />
      <Publish job={job} />
      <Files job={job} files={files.data.data} />
    </>
  );
}

function Files({ job, files }: { job: Job; files: ArtifactFile[] }) {
  const place = (file: ArtifactFile) =>
    `/v1/jobs/${job.id}/artifacts/${file.path.split("/").map(encodeURIComponent).join("/")}`;
  return (
    <Table
      caption={
        <>
          {plural(files.length, "file")}, {formatBytes(files.reduce((sum, file) => sum + file.bytes, 0))}
        </>
      }
      head={
        <>
          <th>File</th>
          <th className="number">Size</th>
          <th>SHA-256</th>
        </>
      }
    >
      {files.map((file) => (
        <tr key={file.path}>
          <td>
            <a href={place(file)} download>
              {file.path}
            </a>
          </td>
          <td className="number">{formatBytes(file.bytes)}</td>
          <td className="nowrap">
            <code title={file.sha256}>{file.sha256.slice(0, 16)}…</code> <CopyButton text={file.sha256} />
          </td>
        </tr>
      ))}
    </Table>
  );
}
