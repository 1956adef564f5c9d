// Requests to the service. The key is in a cookie that scripts cannot read; requests that change something carry the
// CSRF token of the sign-in.
import { connection } from "./connection";

export interface ErrorEntry {
  pointer?: string;
  parameter?: string;
  detail: string;
  code: string;
  allowed?: unknown;
}

/** An error response of the service (RFC 9457). */
export class Problem extends Error {
  readonly status: number;
  readonly code: string;
  readonly hint: string;
  readonly errors: ErrorEntry[];
  readonly requestId: string;

  constructor(status: number, body: Record<string, unknown>) {
    super(String(body.detail ?? `The service returned status ${status}.`));
    this.status = status;
    this.code = String(body.code ?? "unknown");
    this.hint = String(body.hint ?? "");
    this.errors = (body.errors as ErrorEntry[] | undefined) ?? [];
    this.requestId = String(body.request_id ?? "");
  }
}

/** The service cannot be reached. */
export class Unreachable extends Error {
  constructor() {
    super("The service is not responding.");
  }
}

type Query = Record<string, string | number | boolean | readonly string[] | null | undefined>;

export interface Options {
  query?: Query;
  body?: unknown;
  form?: FormData;
  raw?: Blob;
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

let csrfToken = "";
let onSignedOut = () => {};

export function setCsrfToken(token: string) {
  csrfToken = token;
}

export function whenSignedOut(listener: () => void) {
  onSignedOut = listener;
}

export function address(path: string, query: Query = {}): string {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value === null || value === undefined || value === "") continue;
    for (const each of Array.isArray(value) ? value : [value]) params.append(name, String(each));
  }
  const text = params.toString();
  return text ? `${path}?${text}` : path;
}

// Responses with an ETag: a poll that returns 304 yields the same object, and nothing is rendered again.
const MAX_REMEMBERED = 100;
const remembered = new Map<string, { etag: string; body: unknown }>();

function remember(url: string, etag: string, body: unknown) {
  remembered.delete(url);
  remembered.set(url, { etag, body });
  const oldest = remembered.keys().next().value;
  if (remembered.size > MAX_REMEMBERED && oldest !== undefined) remembered.delete(oldest);
}

export function forgetAnswers() {
  remembered.clear();
}

export async function request<T>(method: string, path: string, options: Options = {}): Promise<T> {
  const url = address(path, options.query);
  const headers: Record<string, string> = { Accept: "application/json", ...options.headers };
  const cached = method === "GET" ? remembered.get(url) : undefined;
  if (cached) headers["If-None-Match"] = cached.etag;
  if (method !== "GET") headers["X-CSRF-Token"] = csrfToken;
  if (options.body !== undefined) headers["Content-Type"] = "application/json";
  const body = options.body === undefined ? (options.form ?? options.raw) : JSON.stringify(options.body);
  const response = await send(url, { method, headers, body, signal: options.signal, cache: "no-store" });
  if (response.status === 304 && cached) return cached.body as T;
  if (response.status === 204) return undefined as T;
  if (!response.ok) throw problem(response.status, await response.json().catch(() => ({})));
  const answer = await read(response, options.signal);
  const etag = response.headers.get("ETag");
  if (method === "GET" && etag) remember(url, etag, answer);
  return answer as T;
}

async function send(url: string, init: RequestInit): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(url, init);
  } catch (error) {
    if (init.signal?.aborted) throw error;
    connection.report(true);
    throw new Unreachable();
  }
  connection.report(response.status >= 502 && response.status <= 504);
  return response;
}

/** The content of a response. One that breaks off is an error, not an empty answer: it would be remembered. */
async function read(response: Response, signal: AbortSignal | undefined): Promise<unknown> {
  let text: string;
  try {
    text = await response.text();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable();
  }
  return text ? JSON.parse(text) : {};
}

function problem(status: number, body: Record<string, unknown>): Problem {
  const error = new Problem(status, body);
  if (status === 401) onSignedOut();
  return error;
}

export const get = <T>(path: string, query?: Query, signal?: AbortSignal) => request<T>("GET", path, { query, signal });
export const post = <T>(path: string, body?: unknown, query?: Query) => request<T>("POST", path, { body, query });
export const remove = (path: string) => request<void>("DELETE", path);

/** Open a stream. Returns the response after its status has been checked. */
export async function open(path: string, headers: Record<string, string>, signal: AbortSignal): Promise<Response> {
  const response = await send(path, { headers, signal, cache: "no-store" });
  if (!response.ok) throw problem(response.status, await response.json().catch(() => ({})));
  return response;
}
