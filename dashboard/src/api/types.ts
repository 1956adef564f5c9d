// Short names for the responses of the service. Every build generates `schema.d.ts` from the OpenAPI document.
import type { components } from "./schema";

type Schemas = components["schemas"];

/** A request as the pages write it: what is not set is left out, and never null. */
type Given<T> = T extends object ? { [K in keyof T]: Given<Exclude<T[K], null>> } : T;

export type Job = Schemas["JobOut"];
export type JobCreate = Given<Schemas["JobCreate"]>;
export type Goal = Schemas["Goal"];
export type Runtime = Schemas["Goal"]["runtime"];
export type Target = Given<Schemas["PublishTo"]>;
export type JobPage = Schemas["JobPage"];
export type LabelNames = Schemas["LabelNames"];
export type JobGroups = Schemas["Groups"];
export type JobGroup = Schemas["GroupOut"];
export type JobSummary = Schemas["SummaryOut"];
export type State = Schemas["State"];
export type Phase = Schemas["PhaseOut"];
export type JobEvent = Schemas["EventOut"];
export type EventPage = Schemas["EventPage"];
export type LogLine = Schemas["LogLineOut"];
export type LogPage = Schemas["LogPage"];
export type ArtifactFile = Schemas["FileOut"];
export type Plan = Schemas["PlanOut"];
export type Progress = Schemas["ProgressOut"];
export type Publication = Schemas["PublicationOut"];
export type PublishPlan = Schemas["PublishPlan"];
export type Preset = Schemas["PresetOut"];
export type Inspection = Schemas["InspectionOut"];
export type ModelFolders = Schemas["FolderList"];
export type Dataset = Schemas["DatasetOut"];
export type DatasetPage = Schemas["DatasetPage"];
export type Preview = Schemas["PreviewOut"];
export type Upload = Schemas["UploadOut"];
export type Worker = Schemas["WorkerOut"];
export type LocalRun = Schemas["LocalRunOut"];
export type LocalRunList = Schemas["LocalRunList"];
export type Key = Schemas["KeyOut"];
export type NewKey = Schemas["NewKeyOut"];
export type Member = Schemas["MemberOut"];
export type NewMember = Schemas["NewMemberOut"];
export type HubToken = Schemas["HubTokenOut"];
export type Webhook = Schemas["WebhookOut"];
export type NewWebhook = Schemas["NewWebhookOut"];
export type Share = Schemas["ShareOut"];
export type NewShare = Schemas["NewShareOut"];
export type DeliveryPage = Schemas["DeliveryPage"];
export type AuditPage = Schemas["AuditPage"];
export type Oidc = Schemas["OidcOut"];
export type OidcStart = Schemas["OidcStart"];
export type SignIn = Schemas["SignInOut"];
export type ProjectUsage = Schemas["ProjectUsage"];
export type Report = Schemas["Report"];
export type Summary = Schemas["Summary"];
export type ResultChange = Schemas["ChangeOut"];
export type PairedChange = Schemas["PairedChange"];
export type GoalResult = Schemas["GoalResult"];
export type GoalTrial = Schemas["GoalTrial"];
export type Quality = Schemas["Quality"];
export type Drafts = Schemas["DraftQuality"];
export type Verdict = Schemas["Verdict"];
export type Level = Verdict["level"];
export type Measured = Schemas["Measure"];
export type Gate = Schemas["GateResult"];
export type Chat = Schemas["ChatOut"];
export type ChatTurn = Schemas["TurnOut"];
export type ChatAnswer = Schemas["Answer"];
export type RegisteredModel = Schemas["RegisteredModelOut"];
export type RegisteredModelPage = Schemas["RegisteredModelPage"];
export type RegistryVersion = Schemas["RegistryVersionOut"];
export type RegistryVersionPage = Schemas["RegistryVersionPage"];
export type AliasRequest = Schemas["AliasRequestOut"];
export type AliasRequestPage = Schemas["AliasRequestPage"];
export type ProtectedAliases = Schemas["ProtectedAliases"];
export type Actor = Schemas["Actor"];
export type UsedModel = Schemas["ModelOut"];
export type Sweep = Schemas["SweepOut"];
export type SweepBrief = Schemas["SweepBrief"];
export type SweepPage = Schemas["SweepPage"];
export type ModelPage = Schemas["ModelPage"];
export type ModelResult = Schemas["ResultOut"];
export type ResultPage = Schemas["ResultPage"];
export type ResultBrief = Schemas["ResultBrief"];
export type Recipe = Schemas["RecipeOut"];
export type List<T> = { data: T[] };

/** An event of a layer: the OpenAPI document has no types of events. */
export interface Layer {
  name: string;
  block: number;
  relative_error: number;
  sqnr_db: number;
  scheme: string;
  output_error?: number | null;
  weight_spread?: Schemas["WeightSpread"] | null;
  input_range?: Schemas["InputRange"] | null;
}

export const summaryOf = (job: Job) => job.summary;
export const schemeOf = (job: Job) => job.preset ?? (job.goal ? "goal" : job.mix ? "mixed" : "custom");
export const modelOf = (job: Job) => String(job.model.id ?? job.model.path ?? "");
