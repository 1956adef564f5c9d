// The texts, times and errors of the page of components. Nothing here changes with the day or the machine.
import { Problem } from "../../api/client";
import type { Query } from "../../api/query";

export const LONG =
  "The weights of model.layers.7.mlp.down_proj are not finite, and nothing can be computed from them. ".repeat(4);
export const ONE_WORD = "W".repeat(120);
/** Markup, a script, a mark that turns the direction of writing around, and many marks on one letter. */
export const HOSTILE = `<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>\u202etxt.exe e${"\u0301".repeat(20)}`;

export const PROBLEM = new Problem(409, {
  detail: "The job is running; delete is for a job that has ended.",
  code: "wrong_state",
  hint: "Cancel it first.",
  request_id: "req_0123456789abcdef",
});
export const LONG_PROBLEM = new Problem(422, { detail: LONG + ONE_WORD, code: "nonfinite_weights", hint: HOSTILE });

const reload = () => undefined;
export const QUERIES: Record<string, Query<unknown>> = {
  loading: { data: undefined, error: undefined, reload },
  error: { data: undefined, error: new Error("The service is not responding."), reload },
};

/** Names with values, as many kinds of them as there are. */
export const FACTS: [string, string][] = [
  ["Model", "SmolLM2-135M-Instruct"],
  ["Size", "90.5 MB"],
  ["Perplexity", "–"],
  ["Path", `/models/${"a-long-folder/".repeat(6)}`],
  [ONE_WORD.slice(0, 40), ONE_WORD],
  ["Hostile", HOSTILE],
];
