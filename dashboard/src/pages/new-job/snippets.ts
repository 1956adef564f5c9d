// The request as code: curl, command line, Python.
import { type Body, BUDGETS, type Budget, type Calibration, type Goal, isPlainPreset, presetOf } from "./body";

/** Quote a text for a POSIX shell. */
export const quoted = (text: string) => (/^[\w./:@%+=,-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

export function asCurl(body: Body, origin: string): string {
  return [
    `curl -sS ${origin}/v1/jobs`,
    `-H "Authorization: Bearer $BITFOUNDRY_API_KEY"`,
    `-H 'Content-Type: application/json'`,
    `-d ${quoted(JSON.stringify(body))}`,
  ].join(" \\\n  ");
}

const OPTIONS: [keyof Calibration, string][] = [
  ["source", "--dataset"],
  ["config", "--dataset_config"],
  ["split", "--dataset_split"],
  ["column", "--dataset_column"],
  ["num_samples", "--num_calib_data"],
  ["seq_len", "--seq_len"],
  ["seed", "--seed"],
];

const GOAL_OPTIONS: [keyof Goal, string][] = [
  ["runtime", "--runtime"],
  ["device", "--device"],
  ["max_size", "--max_size"],
  ["min_recovery", "--min_recovery"],
  ["context", "--context"],
];

/** One of several sources as --dataset takes it: org/code:column=content:0.25. */
function sharedText({ source, share = 1, ...fields }: NonNullable<Calibration["sources"]>[number]) {
  return [source, ...Object.entries(fields).map(([name, value]) => `${name}=${value}`), share].join(":");
}

const asFile = (name: string, content: unknown) => `cat > ${name} <<'JSON'\n${JSON.stringify(content, null, 2)}\nJSON`;

/** The command line. A config that is not a plain preset, and a target with settings, are written to files first. */
export function asCommand(body: Body, origin: string): string {
  const isFile = body.config !== undefined && !isPlainPreset(body);
  const { repo_id: repo, to, hub_token: writeToken, ...rest } = body.publish ?? {};
  const isPlace = Object.keys(rest).length === 0;
  const files = [
    ...(isFile ? [asFile("config.json", body.config)] : []),
    ...(isPlace ? [] : [asFile("publish.json", body.publish)]),
  ];
  const scheme = isFile ? "config.json" : body.config ? quoted(presetOf(body) ?? "") : "";
  const model = quoted(body.model.path ?? body.model.id ?? "");
  const parts = [`bitfoundry submit ${model}${scheme ? ` --quant_scheme ${scheme}` : ""}`];
  const add = (option: string, value: unknown) => {
    if (value !== undefined && value !== "") parts.push(`${option} ${quoted(String(value))}`);
  };
  for (const [name, option] of GOAL_OPTIONS) add(option, body.goal?.[name]);
  if (body.goal?.max_time_s) add("--time", `${body.goal.max_time_s}s`);
  if (body.mix) add("--schemes", body.mix.schemes.join(","));
  for (const name of Object.keys(BUDGETS) as Budget[]) add(`--${name}`, body.mix?.[name]);
  add("--effort", body.effort);
  for (const name of body.export ?? []) add("--model_export", name);
  if (body.calibration?.sources) add("--dataset", body.calibration.sources.map(sharedText).join(","));
  for (const [field, option] of OPTIONS) add(option, body.calibration?.[field]);
  const { chat_template_kwargs: evalArguments, ...evaluation } = body.evaluation ?? {};
  add(
    "--chat_template_kwargs",
    body.calibration?.chat_template_kwargs && JSON.stringify(body.calibration.chat_template_kwargs),
  );
  add("--eval_chat_template_kwargs", evalArguments && JSON.stringify(evalArguments));
  add("--name", body.name);
  for (const [name, value] of Object.entries(body.labels ?? {})) add("--label", `${name}=${value}`);
  add("--priority", body.priority);
  add("--max_runtime_s", body.limits?.max_runtime_s);
  add("--max_pending_s", body.limits?.max_pending_s);
  add("--max_shard_size", body.max_shard_size);
  add("--gate", body.gate);
  for (const [name, value] of Object.entries(evaluation))
    add("--evaluation", `${name}=${Array.isArray(value) ? value.join(",") : value}`);
  if (body.file2file) parts.push("--file2file_quantization");
  if (typeof body.shard_blocks === "boolean") parts.push(body.shard_blocks ? "--shard_blocks" : "--no-shard_blocks");
  add("--publish", isPlace ? (repo ?? to) : "publish.json");
  if (isPlace) add("--publish_token", writeToken);
  if (body.model.revision !== "main") add("--revision", body.model.revision);
  add("--hub_token", body.model.hub_token);
  add("--url", origin);
  return [...files, parts.join(" \\\n  ")].join("\n");
}

/** The fields of the request that the command line has no option for. */
export function missingInCommand(body: Body): string[] {
  return body.calibration?.revision ? ["the revision of the calibration data"] : [];
}

export function asPython(body: Body, origin: string): string {
  const { model, ...rest } = body;
  const lines = Object.entries({ model, ...rest }).map(([name, value]) => {
    const shown = name === "config" && isPlainPreset(body) ? presetOf(body) : value;
    return `        ${name === "model" ? "" : `${name}=`}${pythonText(shown)},`;
  });
  return `import os

from bitfoundry.client.service import Client

with Client("${origin}", os.environ["BITFOUNDRY_API_KEY"]) as client:
    job = client.submit(
${lines.join("\n")}
    )
    job = client.wait(job.id)
    print(job.state, job.summary)`;
}

export function pythonText(value: unknown): string {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(pythonText).join(", ")}]`;
  if (typeof value === "object") {
    const members = Object.entries(value).map(([name, member]) => `${JSON.stringify(name)}: ${pythonText(member)}`);
    return `{${members.join(", ")}}`;
  }
  return JSON.stringify(value);
}
