import type { ReactNode } from "react";
import { get } from "../api/client";
import { useQuery } from "../api/query";
import type { ModelFolders } from "../api/types";
import { formatBytes, shortName } from "../format";
import { Link } from "../link";
import { useSession } from "../sign-in";
import { Code, Empty } from "../ui/basics";

const SMALLEST = 3;
const FIRST_PRESET = "int8_weight_only"; // ready in a minute or two for a small model, and hardly a loss for any

/** An empty page before the first job: it says what will appear there, and offers a job with a model of the server. */
export function FirstJob({ children }: { children: ReactNode }) {
  const mayWrite = useSession().can("jobs:write");
  return (
    <Empty>
      <p>{children}</p>
      {mayWrite && <Ways />}
    </Empty>
  );
}

function Ways() {
  const found = useQuery("model-folders", (signal) => get<ModelFolders>("/v1/models/folders", {}, signal));
  const models = (found.data?.data ?? []).filter(({ is_result }) => !is_result);
  const smallest = models.sort((a, b) => a.size_bytes - b.size_bytes).slice(0, SMALLEST);
  return (
    <>
      <p>
        A job makes a model smaller, measures the quality loss, and verifies that the files load. You choose where the
        result will run, how large it may be and how good it must be.
      </p>
      <div className="row">
        {smallest.map(({ path, size_bytes }) => (
          <Link
            key={path}
            to="/jobs/new"
            search={{ path, preset: FIRST_PRESET }}
            className="button primary wrap"
            title={path}
          >
            Quantize {shortName(path)} ({formatBytes(size_bytes)}) to 8 bits
          </Link>
        ))}
        <Link to="/jobs/new" className={smallest.length ? "button" : "button primary"}>
          {smallest.length ? "Choose a model and a goal" : "Create your first job"}
        </Link>
      </div>
      <p>or on the command line, with a folder on the server or a model on the Hub:</p>
      <Code text="bitfoundry submit org/name --quant_scheme w4a16 --wait" label="Command that submits a job" />
    </>
  );
}
