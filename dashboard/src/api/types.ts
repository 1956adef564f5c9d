// Short names for the responses of the service. Every build generates `schema.d.ts` from the OpenAPI document.
import type { components } from "./schema";

type Schemas = components["schemas"];

export type Job = Schemas["JobOut"];
export type JobPage = Schemas["JobPage"];
export type JobSummary = Schemas["SummaryOut"];
export type State = Schemas["State"];
export type Phase = Schemas["PhaseOut"];
export type JobEvent = Schemas["EventOut"];
export type EventPage = Schemas["EventPage"];
export type LogLine = Schemas["LogLineOut"];
export type LogPage = Schemas["LogPage"];
export type ArtifactFile = Schemas["FileOut"];
export type Preset = Schemas["PresetOut"];
export type Inspection = Schemas["InspectionOut"];
export type Dataset = Schemas["DatasetOut"];
export type DatasetPage = Schemas["DatasetPage"];
export type Preview = Schemas["PreviewOut"];
export type Upload = Schemas["UploadOut"];
export type Worker = Schemas["WorkerOut"];
export type Key = Schemas["KeyOut"];
export type NewKey = Schemas["NewKeyOut"];
export type HubToken = Schemas["HubTokenOut"];
export type Webhook = Schemas["WebhookOut"];
export type NewWebhook = Schemas["NewWebhookOut"];
export type DeliveryPage = Schemas["DeliveryPage"];
export type AuditPage = Schemas["AuditPage"];
export type SignIn = Schemas["SignInOut"];
export type ProjectUsage = Schemas["ProjectUsage"];
export type List<T> = { data: T[] };

// Types of what is untyped in the OpenAPI document, with the fields that the pages show.
export interface Progress {
  phase: string;
  done: number;
  total: number;
  unit: string;
  eta_s?: number | null;
}

export interface JobFailure {
  code: string;
  message: string;
  hint?: string;
  retryable?: boolean;
}

export interface ExportSummary {
  path: string;
  bytes: number;
  load: string;
}

export interface Summary {
  size_before_bytes: number;
  size_after_bytes: number;
  perplexity_before: number | null;
  perplexity_after: number | null;
  perplexity_ratio: number | null;
  kl_mean?: number | null;
  /** Of a job with a mix: `kl_mean` is measured without GPTQ. */
  mix?: { layers: Record<string, number>; bits: number; loss: number; kl_mean: number };
  gates?: Gate[];
  worst_layer: { name: string; relative_error: number; sqnr_db: number };
  num_layers_quantized: number;
  num_layers_kept: number;
  quantize_s: number;
  total_s: number;
  peak_memory_bytes: number;
  planned_peak_memory_bytes: number;
  /** Tasks of lm-evaluation-harness that have no result, each with the reason. */
  failed_tasks?: Record<string, string>;
  exports: Record<string, ExportSummary>;
}

export interface Layer {
  name: string;
  block: number;
  relative_error: number;
  sqnr_db: number;
  scheme: string;
  output_error?: number | null;
}

export interface Plan {
  model_type: string;
  num_blocks: number;
  num_layers: number;
  layers: { name: string; block: number; shape: number[]; scheme: string; chosen_by: string }[];
  kept: { name: string; reason: string }[];
  exports: string[];
  needs_calibration: boolean;
  size_before_bytes: number;
  size_after_bytes: number;
  executor: string;
  peak_memory_bytes: number;
  memory_bytes: Record<string, number>;
  warnings: string[];
  config: Record<string, unknown>;
  preset: string | null;
  time_s?: number | null;
}

export interface Measured {
  value: number | null;
  stderr: number | null;
}

export interface Quality {
  num_tokens: number;
  before: { token_perplexity: Measured };
  after: { token_perplexity: Measured };
  divergence: { kl_mean: Measured; kl_p99: number; top1_agreement: Measured };
}

export interface Report {
  summary: Summary;
  proof?: Record<
    string,
    {
      num_tensors_equal: number;
      max_logit_difference: number | null;
      perplexity: number | null;
      consumer_check?: { consumer?: string; logit_difference?: number; not_checked?: string };
    }
  >;
  quality?: Quality | null;
  samples?: { prompt: string; original: string; quantized: string }[] | null;
  kept?: { name: string; reason: string }[];
  warnings?: string[];
  environment?: Record<string, string>;
}

export interface Gate {
  gate: string;
  name: string;
  status: "pass" | "warn" | "fail" | "skipped";
  value: number | null;
  limit: number | null;
  detail: string;
}

export type Publication = Schemas["PublicationOut"];

export const progressOf = (job: Job) => job.progress as Progress | null;
export const summaryOf = (job: Job) => job.summary as Summary | null;
export const failureOf = (job: Job) => job.error as JobFailure | null;
export const schemeOf = (job: Job) => job.preset ?? (job.mix ? "mixed" : "custom");
export const modelOf = (job: Job) => String(job.model.id ?? job.model.path ?? "");
