import { expect, it } from "vitest";
import type { Job, Preset } from "../../api/types";
import {
  type Body,
  bodyOf,
  budgetOf,
  chainOf,
  effortOfConfig,
  isInMore,
  labelsText,
  presetConfigFor,
  presetOf,
  readLabels,
  recoveryOf,
  START_GOAL,
  START_MIX,
  START_SCHEME,
  valueAt,
  withBudget,
  withChain,
  withGoal,
  withMix,
  withPreset,
  withSource,
  withValue,
} from "./body";
import { CHANGES } from "./form";
import { controlOf, type Schema, unwrap } from "./schema";
import { asCommand, asCurl, asPython, missingInCommand, pythonText, quoted } from "./snippets";

const BODY: Body = { model: { path: "/models/it's" }, config: { preset: "fp8" }, export: ["quark"] };
const ORIGIN = "http://127.0.0.1:8765";

it("sets a value at a pointer, and leaves out what is empty", () => {
  const named = withValue(BODY, "/calibration/num_samples", 8);
  expect(named.calibration).toEqual({ num_samples: 8 });
  expect(BODY.calibration).toBeUndefined();
  expect(withValue(named, "/calibration/num_samples", "")).toEqual(BODY);
});

it("has an input for each change that a job can make to its preset", () => {
  for (const [name, change] of Object.entries(CHANGES)) {
    expect(controlOf(unwrap(change, change).schema, change).kind, name).not.toBe("json");
    expect(change.title, name).toBeTruthy();
  }
});

it("another preset keeps the formats that can hold it, and leaves the choice to the service if none can", () => {
  const preset = (exports: string[]) => ({ name: "p", exports }) as Preset;
  const body = { ...BODY, export: ["quark", "onnx"] };
  expect(withPreset(body, preset(["onnx", "awq"])).export).toEqual(["onnx"]);
  expect(withPreset(body, preset(["gguf"]))).not.toHaveProperty("export");
  expect(presetOf(withPreset(body, preset(["quark"])))).toBe("p");
});

it("clones a job: the commit that it had, and its preset by name unless something was changed", () => {
  const gptq = [{ name: "gptq" }];
  const recipes = { fast: [], balanced: gptq, best: [{ name: "gptaq" }] };
  const presets = [{ name: "fp8", aliases: ["f"], config: { a: 1 }, recipes }] as unknown as Preset[];
  const job = {
    model: { id: "org/m", revision: "main", sha: "c0ffee" },
    preset: "f",
    config: { a: 1, algo_config: gptq },
    calibration: {},
    export: ["quark"],
    name: null,
    labels: {},
    priority: 5,
    limits: { max_runtime_s: 60, max_pending_s: null },
    max_shard_size: "5GB",
    gate: "fail",
    evaluation: { num_windows: 3, tasks: [] },
    file2file: false,
    shard_blocks: null,
    publish: { repo_id: "org/out" },
  } as unknown as Job;
  expect(bodyOf(job, presets)).toMatchObject({
    model: { id: "org/m", revision: "c0ffee" },
    config: { preset: "fp8" },
    limits: { max_runtime_s: 60 },
  });
  expect(bodyOf({ ...job, config: { a: 2 } }, presets).config).toEqual({ a: 2 });
  expect(bodyOf({ ...job, config: { a: 1 } }, presets)).toMatchObject({ config: { preset: "fp8" }, effort: "fast" });
  const cloned = bodyOf(job, presets);
  expect(cloned).not.toHaveProperty("effort");
  for (const name of ["name", "file2file", "shard_blocks", "publish"]) expect(cloned).not.toHaveProperty(name);
  expect(cloned).toMatchObject({ gate: "fail", evaluation: { num_windows: 3 } });
  expect(cloned.evaluation).not.toHaveProperty("tasks");
  expect(bodyOf({ ...job, file2file: true, shard_blocks: false }, presets)).toMatchObject({
    file2file: true,
    shard_blocks: false,
  });
});

it("a mix takes the config's place, but for the algorithms, and has one budget", () => {
  const mixed = withMix({ ...BODY, config: { global_quant_config: {}, algo_config: [{ name: "gptq" }] } }, START_MIX);
  expect(mixed).toEqual({ ...BODY, config: { algo_config: [{ name: "gptq" }] }, mix: START_MIX });
  expect(withMix(BODY, START_MIX)).not.toHaveProperty("config");
  expect(presetOf(withMix(BODY, START_MIX))).toBeNull();
  expect(withMix(mixed, undefined)).toEqual({ ...BODY, config: { preset: "w4a16" } });
  expect(withBudget(START_MIX, "max_size")).toEqual({ schemes: START_MIX.schemes, max_size: "90MB" });
  expect(budgetOf(withBudget(START_MIX, "max_divergence"))).toBe("max_divergence");
});

it("clones and snippets hold a mix", () => {
  const mix = { schemes: ["w4a16", "keep"], max_size: "90MB" };
  const job = {
    model: { path: "/m" },
    preset: null,
    config: { global_quant_config: {}, exclude: [], algo_config: [] },
    mix,
    calibration: {},
    export: ["quark"],
    name: null,
    labels: {},
    priority: 5,
    limits: {},
    max_shard_size: "5GB",
    gate: "warn",
    evaluation: {},
    file2file: false,
    shard_blocks: null,
  } as unknown as Job;
  const cloned = bodyOf(job, []);
  expect(cloned.mix).toEqual(mix);
  expect(cloned).not.toHaveProperty("config");
  const algorithms = { algo_config: [{ name: "gptq" }] };
  const better = bodyOf({ ...job, config: { ...job.config, ...algorithms } }, []);
  expect(better.config).toEqual(algorithms);
  expect(asCommand(cloned, ORIGIN)).toContain("bitfoundry submit /m \\\n  --schemes w4a16,keep \\\n  --max_size 90MB");
  expect(asCommand(cloned, ORIGIN)).not.toContain("--quant_scheme");
  expect(asCommand(better, ORIGIN)).toContain("bitfoundry submit /m --quant_scheme config.json");
  expect(asPython(cloned, ORIGIN)).toContain('mix={"schemes": ["w4a16", "keep"], "max_size": "90MB"},');
});

it("algorithms are named, or none, or those of the effort", () => {
  const best: Body = { ...BODY, effort: "best" };
  const chain = [{ name: "smoothquant", alpha: 0.5 }, { name: "gptq" }];
  const named = withChain(best, chain);
  expect(named.config).toEqual({ preset: "fp8", algo_config: chain });
  expect(named).not.toHaveProperty("effort");
  expect(chainOf(named)).toEqual(chain);
  expect(withChain(best, []).config).toEqual({ preset: "fp8", algo_config: [] });
  expect(withChain(named, undefined)).toEqual(BODY);
  expect(withChain({ model: BODY.model, mix: START_MIX, config: { algo_config: chain } }, undefined)).toEqual({
    model: BODY.model,
    mix: START_MIX,
  });
  expect(chainOf(BODY)).toBeUndefined();
  expect(isInMore("/config/algo_config/0/alpha") && !isInMore("/config/preset")).toBe(true);
  expect(asCommand(best, ORIGIN)).toContain("--effort best");
  for (const snippet of [asCommand(named, ORIGIN), asPython(named, ORIGIN), asCurl(named, ORIGIN)])
    expect(snippet).toMatch(/"alpha": ?0.5/);
});

it("another source drops the settings of the previous one", () => {
  const body: Body = { ...BODY, evaluation: { source: "wikitext", split: "test", stride: 64, num_windows: 3 } };
  expect(withSource(body, "evaluation", "builtin").evaluation).toEqual({ source: "builtin", num_windows: 3 });
  expect(withSource(body, "evaluation", "").evaluation).toEqual({ num_windows: 3 });
  expect(withSource(BODY, "calibration", "")).toEqual(BODY);
  expect(valueAt(body, "/evaluation/split")).toBe("test");
  expect(valueAt(body, "/calibration/split")).toBeUndefined();
});

it("several sources give way to one, and are one option of the command", () => {
  const sources = [
    { source: "/a.txt", share: 0.75 },
    { source: "org/code", column: "content" },
  ];
  const body: Body = { ...BODY, calibration: { sources, num_samples: 8 } };
  expect(withSource(body, "calibration", "pileval").calibration).toEqual({ source: "pileval", num_samples: 8 });
  expect(asCommand(body, ORIGIN)).toContain("--dataset /a.txt:0.75,org/code:column=content:1 \\\n");
  expect(asPython(body, ORIGIN)).toContain('"sources": [{"source": "/a.txt", "share": 0.75}');
});

it("arguments of chat templates are JSON in the command", () => {
  const chat_template_kwargs = { enable_thinking: false };
  const body: Body = {
    ...BODY,
    calibration: { chat_template_kwargs },
    evaluation: { source: "a", chat_template_kwargs },
  };
  const command = asCommand(body, ORIGIN);
  expect(command).toContain(`--chat_template_kwargs '{"enable_thinking":false}' \\\n`);
  expect(command).toContain(`--eval_chat_template_kwargs '{"enable_thinking":false}' \\\n`);
  expect(command).not.toContain("object");
});

it("labels go to text and back", () => {
  const labels = { team: "search", url: "a=b" };
  expect(readLabels(labelsText(labels))).toEqual(labels);
  expect(readLabels("")).toEqual({});
});

it("quotes for the shell", () => {
  expect(quoted("plain/path-1.2")).toBe("plain/path-1.2");
  expect(quoted("it's $HOME")).toBe(`'it'\\''s $HOME'`);
});

it("snippets hold the whole request", () => {
  expect(asCurl(BODY, ORIGIN)).toContain(
    `-d '{"model":{"path":"/models/it'\\''s"},"config":{"preset":"fp8"},"export":["quark"]}'`,
  );
  const own = { ...BODY, config: { global_quant_config: {} }, labels: { team: "a b" }, calibration: { seed: 7 } };
  expect(asCommand(own, ORIGIN)).toContain("cat > config.json <<'JSON'");
  expect(asCommand(own, ORIGIN)).toContain("--label 'team=a b'");
  expect(asCommand(BODY, ORIGIN)).toContain("--quant_scheme fp8");
  expect(asCommand(own, ORIGIN)).toContain("--seed 7");
  expect(missingInCommand({ ...BODY, calibration: { revision: "v1" } })).toHaveLength(1);
  expect(asPython(BODY, ORIGIN)).toContain('config="fp8",');
  expect(pythonText({ a: [true, null, 'x"y'] })).toBe('{"a": [True, None, "x\\"y"]}');
});

it("snippets hold how the result is measured and where it goes", () => {
  const request: Body = {
    ...BODY,
    gate: "fail",
    evaluation: { source: "org/my set", num_windows: 0, tasks: ["gsm8k", "piqa"] },
    file2file: true,
    shard_blocks: false,
    publish: { repo_id: "org/out", hub_token: "team" },
  };
  const command = asCommand(request, ORIGIN);
  for (const part of [
    "--gate fail",
    "--evaluation 'source=org/my set'",
    "--evaluation num_windows=0",
    "--evaluation tasks=gsm8k,piqa",
    "--file2file_quantization",
    "--no-shard_blocks",
    "--publish org/out",
    "--publish_token team",
  ])
    expect(command).toContain(`${part} \\\n`);
  expect(command).not.toContain("cat >");
  expect(asCommand({ ...BODY, publish: { to: "s3://a/b" } }, ORIGIN)).toContain("--publish s3://a/b");
  const more = asCommand({ ...BODY, publish: { repo_id: "org/out", private: true, hub_token: "team" } }, ORIGIN);
  expect(more).toContain(
    `cat > publish.json <<'JSON'\n{\n  "repo_id": "org/out",\n  "private": true,\n  "hub_token": "team"\n}\nJSON`,
  );
  expect(more).toContain("--publish publish.json");
  expect(more).not.toContain("--publish_token");
  expect(asPython(request, ORIGIN)).toContain(
    'evaluation={"source": "org/my set", "num_windows": 0, "tasks": ["gsm8k", "piqa"]},',
  );
  expect(asPython(request, ORIGIN)).toContain("file2file=True,");
  expect(asCurl(request, ORIGIN)).toContain('"gate":"fail"');
});

it("reads the config's schema into controls", () => {
  const root: Schema = {
    $defs: { Dtype: { enum: ["int8"], description: "Formats" }, GPTQ: { type: "object", properties: {} } },
  };
  const nullable = unwrap({ anyOf: [{ $ref: "#/$defs/Dtype" }, { type: "null" }], description: "Own" }, root);
  expect(nullable).toMatchObject({ nullable: true, schema: { description: "Own" } });
  expect(controlOf(nullable.schema, root)).toEqual({ kind: "choice", options: ["int8"] });
  const variants = {
    type: "array",
    items: { discriminator: { propertyName: "name", mapping: { gptq: "#/$defs/GPTQ" } }, oneOf: [] },
  };
  expect(controlOf(variants, root)).toMatchObject({
    kind: "variants",
    name: "name",
    variants: { gptq: { type: "object" } },
  });
  expect(controlOf({ type: "array", prefixItems: [] }, root)).toEqual({ kind: "json" });
  expect(controlOf({ type: "array", items: { type: "string" } }, root)).toEqual({ kind: "texts" });
});

it("a goal takes the place of everything that it chooses, and a clone asks for it again", () => {
  const mixed: Body = { model: { path: "/m" }, mix: START_MIX, effort: "best", export: ["gguf"], name: "n" };
  expect(withGoal(mixed)).toEqual({ model: { path: "/m" }, goal: START_GOAL, name: "n" });
  expect(withMix(withGoal(mixed), undefined)).toEqual({ model: { path: "/m" }, name: "n", ...START_SCHEME });
  expect([recoveryOf(""), recoveryOf("0.99"), recoveryOf("best")]).toEqual([undefined, 0.99, "best"]);
  const job = {
    model: { path: "/m" },
    goal: { runtime: "vllm", device: "cpu", max_size: null },
    config: {},
    limits: {},
  };
  const cloned = bodyOf({ ...job, labels: {}, evaluation: {}, export: ["compressed_tensors"] } as unknown as Job, []);
  expect(cloned.goal).toEqual({ runtime: "vllm", device: "cpu" });
  for (const name of ["config", "export", "effort"]) expect(cloned).not.toHaveProperty(name);
});

it("shows the flags of a goal", () => {
  const goal = { ...START_GOAL, max_size: "4GB", min_recovery: 0.99, context: 4096, max_time_s: 60 };
  const command = asCommand({ model: { path: "/m" }, goal }, ORIGIN);
  const flags = [
    "--runtime vllm",
    "--device 24GB",
    "--max_size 4GB",
    "--min_recovery 0.99",
    "--context 4096",
    "--time 60s",
  ];
  for (const flag of flags) expect(command).toContain(flag);
});

it("shows no change for a preset whose algorithms are those of an effort", () => {
  const recipes = { fast: [], balanced: [{ name: "gptq" }], best: [{ name: "yaqa" }] };
  const preset = { name: "w4a16", aliases: [], config: { a: 1 }, recipes } as unknown as Preset;
  const algorithms = (...names: string[]) => ({ a: 1, algo_config: names.map((name) => ({ name })) });
  expect(presetConfigFor(preset, algorithms("gptq"))).toEqual(algorithms("gptq"));
  expect(presetConfigFor(preset, { a: 2, algo_config: [{ name: "yaqa" }] })).toEqual(algorithms("yaqa"));
  expect(presetConfigFor(preset, algorithms("rtn"))).toEqual({ a: 1 }); // named by itself: a change
  expect([effortOfConfig(preset, { a: 1 }), effortOfConfig(preset, algorithms("rtn"))]).toEqual(["fast", undefined]);
});
