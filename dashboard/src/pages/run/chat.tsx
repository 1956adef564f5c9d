import { useEffect, useRef, useState } from "react";
import { get, Problem, post, remove } from "../../api/client";
import { followMessages, type Link } from "../../api/stream";
import type { Chat, ChatAnswer, ChatTurn, Job } from "../../api/types";
import { formatDuration, plural } from "../../format";
import { announce } from "../../ui/announcer";
import { Failure, Field, Loading } from "../../ui/basics";
import { type ChatLog, differenceText, endText, isUnanswered, splitAnswer, update } from "./chat-log";

const MAX_PROMPT_CHARS = 8000;

/** A chat with the result and its original, side by side, on a worker. */
export function TryIt({ job }: { job: Job }) {
  const [round, setRound] = useState(0);
  const { log, link, error } = useChat(job.id, round);
  const [failure, setFailure] = useState<Error>();
  const [busy, setBusy] = useState(false);
  useAnnounceAnswers(log);

  const act = async (action: () => Promise<unknown>) => {
    setBusy(true);
    setFailure(undefined);
    const caught: unknown = await action().catch((error) => error);
    if (caught instanceof Error) setFailure(caught);
    setBusy(false);
    return !(caught instanceof Error);
  };
  const start = async () => {
    if (await act(() => post<Chat>(`/v1/jobs/${job.id}/chat`, {}))) setRound(round + 1);
  };
  if (error) return <Failure error={error} retry={() => setRound(round + 1)} />;
  if (log === undefined) return <Loading />;
  const isOpen = log !== null && log.chat.state !== "ended";
  return (
    <section className="card">
      <div className="row spread">
        <h2>Try it</h2>
        <button
          type="button"
          className={isOpen ? undefined : "primary"}
          disabled={busy}
          onClick={isOpen ? () => act(() => remove(`/v1/chats/${log.chat.id}`)) : start}
        >
          {isOpen ? "End chat" : log ? "Start a new chat" : "Start chat"}
        </button>
      </div>
      <p className="faint">
        Both models answer the same prompts, greedily. Everything from the first token that differs is marked: after it
        the models continue different texts. A worker holds both models in memory meanwhile.
      </p>
      {failure && <Failure error={failure} />}
      {link === "lost" && (
        <div className="notice warn" role="status">
          ⚠ The connection was interrupted. It resumes when the service responds.
        </div>
      )}
      {log && <Turns turns={log.turns} />}
      {log && <State chat={log.chat} />}
      {log?.chat.state === "open" && (
        <Prompt log={log} send={(prompt) => act(() => post(`/v1/chats/${log.chat.id}/turns`, { prompt }))} />
      )}
    </section>
  );
}

function State({ chat }: { chat: Chat }) {
  if (chat.state === "waiting") return <Loading what="Waiting for a worker" />;
  if (chat.state === "starting") return <Loading what="Loading both models" />;
  if (chat.state === "ended")
    return (
      <div className={`notice ${chat.reason === "closed" ? "" : "warn"}`} role="status">
        {endText(chat)}
      </div>
    );
  return chat.has_template ? null : (
    <p className="faint">This model has no chat template: each prompt is continued separately.</p>
  );
}

function Turns({ turns }: { turns: ChatTurn[] }) {
  return (
    <ol className="turns">
      {turns.map((turn) => (
        <li key={turn.number}>
          <p className="prompt">{turn.prompt}</p>
          {turn.error ? (
            <p className="error">
              ✕ {turn.error.message} {turn.error.hint} <code>{turn.error.code}</code>
            </p>
          ) : (
            <Answers turn={turn} />
          )}
        </li>
      ))}
    </ol>
  );
}

function Answers({ turn }: { turn: ChatTurn }) {
  if (!turn.original || !turn.quantized) return <Loading what="Waiting for the first tokens" />;
  const [same, different] = splitAnswer(turn);
  return (
    <div className="answers" aria-busy={isUnanswered(turn)}>
      <div>
        <h3>Original</h3>
        <p className="answer">{turn.original.text}</p>
        <p className="sub">{figures(turn.original)}</p>
      </div>
      <div>
        <h3>Quantized</h3>
        <p className="answer">
          {same}
          {different && <mark>{different}</mark>}
        </p>
        <p className="sub">
          {figures(turn.quantized)} · {differenceText(turn)}
        </p>
      </div>
    </div>
  );
}

const figures = ({ num_tokens, time_s }: ChatAnswer) => `${plural(num_tokens, "token")}, ${formatDuration(time_s)}`;

function Prompt({ log: { chat, turns }, send }: { log: ChatLog; send: (prompt: string) => Promise<boolean> }) {
  const [prompt, setPrompt] = useState("");
  const isAnswering = isUnanswered(turns.at(-1));
  if (turns.length >= chat.max_turns && !isAnswering)
    return <p className="faint">This chat has had its {chat.max_turns} turns. Start a new one to go on.</p>;
  const isReady = !isAnswering && Boolean(prompt.trim());
  const submit = async (event: { preventDefault: () => void }) => {
    event.preventDefault();
    if (isReady && (await send(prompt))) setPrompt((current) => (current === prompt ? "" : current)); // it may be the next one
  };
  return (
    <form onSubmit={submit}>
      <Field
        label="Prompt"
        hint={`Enter sends, Shift+Enter starts a new line. At most ${chat.max_new_tokens} tokens are generated.`}
      >
        {(props) => (
          <textarea
            {...props}
            rows={3}
            maxLength={MAX_PROMPT_CHARS}
            value={prompt}
            onChange={(event) => setPrompt(event.target.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter" && !event.shiftKey && !event.nativeEvent.isComposing) void submit(event);
            }}
          />
        )}
      </Field>
      <div className="actions">
        <button type="submit" className="primary" disabled={!isReady}>
          Send
        </button>
      </div>
    </form>
  );
}

/** The newest chat of a job, kept up to date: null if there is none, undefined until that is known. */
function useChat(jobId: string, round: number): { log: ChatLog | null | undefined; link: Link; error?: Error } {
  const [log, setLog] = useState<ChatLog | null>();
  const [link, setLink] = useState<Link>("open");
  const [error, setError] = useState<Error>();
  // biome-ignore lint/correctness/useExhaustiveDependencies: another round looks for another chat
  useEffect(() => {
    const controller = new AbortController();
    const load = async () => {
      setError(undefined);
      try {
        const chat = await get<Chat>(`/v1/jobs/${jobId}/chat`, {}, controller.signal);
        setLog({ chat, turns: chat.turns ?? [] });
        if (chat.state === "ended") return;
        await followMessages(
          `/v1/chats/${chat.id}/stream`,
          (messages) => setLog((old) => (old ? update(old, messages) : old)),
          setLink,
          controller.signal,
        );
      } catch (caught) {
        if (controller.signal.aborted) return;
        if (caught instanceof Problem && caught.status === 404) setLog(null);
        else setError(caught as Error);
      }
    };
    void load();
    return () => controller.abort();
  }, [jobId, round]);
  return { log, link, error };
}

/** Announces to screen readers when the models are ready and when both have answered. */
function useAnnounceAnswers(log: ChatLog | null | undefined) {
  const state = log?.chat.state;
  const numAnswered = log?.turns.filter((turn) => turn.state === "answered").length ?? 0;
  const before = useRef({ state, numAnswered });
  useEffect(() => {
    const old = before.current;
    if (state === "open" && old.state === "starting") announce("Both models are ready.");
    if (numAnswered > old.numAnswered && old.state === "open") announce("Both models have answered.");
    if (state === "ended" && old.state && old.state !== "ended") announce("The chat has ended.");
    before.current = { state, numAnswered };
  }, [state, numAnswered]);
}
