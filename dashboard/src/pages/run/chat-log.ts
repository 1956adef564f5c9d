// A chat with a run's result as it grows: its messages, reduced to what the page shows.
import type { Message } from "../../api/stream";
import type { Chat, ChatTurn } from "../../api/types";

export interface ChatLog {
  chat: Chat;
  turns: ChatTurn[];
}

/** The chat with the changes of more messages. Turns may come again; an older state never replaces a newer one. */
export function update(log: ChatLog, messages: Message[]): ChatLog {
  let { chat, turns } = log;
  for (const message of messages) {
    if (message.event === "chat") chat = JSON.parse(message.data) as Chat;
    if (message.event !== "turn") continue;
    const turn = JSON.parse(message.data) as ChatTurn;
    const known = turns.find((each) => each.number === turn.number);
    if (known && known.seq >= turn.seq) continue;
    turns = [...turns.filter((each) => each.number !== turn.number), turn].sort((a, b) => a.number - b.number);
  }
  return { chat, turns };
}

/** The quantized model's answer as far as both are equal, and the rest. The service counts characters, not UTF-16. */
export function splitAnswer(turn: ChatTurn): [string, string] {
  const text = turn.quantized?.text ?? "";
  if (typeof turn.first_different_char !== "number") return [text, ""];
  const characters = [...text];
  return [
    characters.slice(0, turn.first_different_char).join(""),
    characters.slice(turn.first_different_char).join(""),
  ];
}

export const isUnanswered = (turn: ChatTurn | undefined) => turn?.state === "waiting" || turn?.state === "answering";

const REASONS: Record<string, string> = {
  closed: "You ended this chat.",
  idle: "This chat ended because it was inactive for too long.",
  time_is_up: "This chat reached its time limit.",
  no_worker: "No worker was available: all are busy, or none has enough memory for both models. Try again later.",
  worker_needed: "This chat ended because a job needed its worker. Try again later.",
  worker_stopped: "This chat ended because its worker was stopped.",
  worker_lost: "This chat ended because its worker was lost.",
  failed: "This chat failed.",
};

/** Why a chat ended, in a sentence. */
export function endText({ reason, error }: Chat): string {
  const text = REASONS[reason ?? ""] ?? "This chat has ended.";
  return error ? `${text} ${error.message} ${error.hint ?? ""}`.trim() : text;
}

/** What an answer is compared with its original's: the token of the first difference, counted from one. */
export function differenceText(turn: ChatTurn): string {
  if (typeof turn.first_difference === "number") return `differs from token ${turn.first_difference + 1} on`;
  return turn.state === "answered" ? "no difference" : "no difference so far";
}
