// What a page proposes to change in a run, as parameters of the form's address: names and texts.
import type { Report } from "../../api/types";
import { type Algorithm, type Body, withChain, withGoal, withValue } from "./body";

export interface Changes {
  effort?: string;
  /** Names of algorithms, separated by commas. */
  algorithms?: string;
  num_windows?: string;
  runtime?: string;
  device?: string;
  gate?: string;
  /** Set if the worst layers get more bits, as the run's report proposes. */
  more_bits?: string;
}

/** The parameters for the fields of a request that a step of a verdict changes. */
export function searchOf(changes: Record<string, unknown>): Changes {
  const { effort, config, evaluation, goal } = changes as {
    effort?: string;
    config?: { algo_config?: Algorithm[] };
    evaluation?: { num_windows?: number };
    goal?: { runtime?: string; device?: string };
  };
  return {
    ...(effort ? { effort } : {}),
    ...(config?.algo_config ? { algorithms: config.algo_config.map(({ name }) => name).join(",") } : {}),
    ...(evaluation?.num_windows ? { num_windows: String(evaluation.num_windows) } : {}),
    ...(goal ? { runtime: goal.runtime, device: goal.device } : {}),
  };
}

/** The request with the changes of an address. */
export function withChanges(body: Body, { effort, algorithms, num_windows, runtime, device, gate }: Changes): Body {
  let changed = body;
  if (effort) changed = { ...withChain(changed, undefined), effort: effort as Body["effort"] };
  if (algorithms)
    changed = withChain(
      changed,
      algorithms.split(",").map((name) => ({ name })),
    );
  if (num_windows) changed = withValue(changed, "/evaluation/num_windows", Number(num_windows));
  if (runtime && device) changed = { ...withGoal(changed), goal: { runtime, device } as Body["goal"] };
  if (gate) changed = { ...changed, gate: gate as Body["gate"] };
  return changed;
}

/** The request with more bits for the layers with the largest errors: a whole config, and the format that holds it. */
export function withMoreBits({ effort: _, ...body }: Body, step: NonNullable<Report["more_bits"]>): Body {
  return { ...body, ...(step.changes as Partial<Body>) };
}
