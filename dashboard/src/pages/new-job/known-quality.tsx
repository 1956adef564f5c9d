import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import type { ResultPage } from "../../api/types";
import { formatBytes, formatNumber, shortId } from "../../format";
import { Link } from "../../link";
import { recipeText } from "../../names";
import { useSettled } from "../../settled";
import { Time } from "../../ui/basics";
import { VerdictLevel } from "../job-progress";
import { type Body, presetOf } from "./body";
import { knownResult } from "./expected";

const WAIT_MS = 600;

/** The quality to expect: what the newest run of this model with the same preset or goal came to. */
export function KnownQuality({ body }: { body: Body }) {
  const model = useSettled(body.model.path || body.model.id || "", WAIT_MS);
  const hasRecipe = !!body.goal || (!body.mix && presetOf(body) !== null);
  const results = useQuery(model && hasRecipe ? `results of ${model}` : null, (signal) =>
    get<ResultPage>("/v1/models/results", { model, limit: 100 }, signal),
  );
  const known = knownResult(body, results.data?.data ?? []);
  if (!known?.verdict) return null;
  return (
    <p>
      An earlier run with {recipeText(known.recipe)} is <VerdictLevel level={known.verdict} />: KL divergence{" "}
      {formatNumber(known.kl_mean, 3)}, {formatBytes(known.size_after_bytes)} (
      <Link to="/jobs/$id" params={{ id: known.job_id }}>
        {known.name ?? shortId(known.job_id)}
      </Link>
      , <Time at={known.finished_at} />
      ).
    </p>
  );
}
