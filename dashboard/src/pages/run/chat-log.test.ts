import { expect, it } from "vitest";
import type { Chat, ChatTurn } from "../../api/types";
import { differenceText, endText, isUnanswered, splitAnswer, update } from "./chat-log";

const answer = (text: string) => ({ text, num_tokens: 3, time_s: 0.1 });
const chat = (changes: Partial<Chat> = {}): Chat => ({
  id: "chat_1",
  job_id: "job_1",
  seq: 1,
  state: "open",
  reason: null,
  error: null,
  has_template: true,
  max_new_tokens: 200,
  max_turns: 20,
  created_at: "2026-11-22T08:00:00Z",
  ended_at: null,
  turns: null,
  ...changes,
});
const turn = (number: number, seq: number, changes: Partial<ChatTurn> = {}): ChatTurn => ({
  number,
  seq,
  prompt: "p",
  state: "answering",
  original: null,
  quantized: null,
  first_difference: null,
  first_different_char: null,
  error: null,
  ...changes,
});
const message = (event: string, data: unknown) => ({ id: "", event, data: JSON.stringify(data) });

it("keeps the newest state of each turn, in order", () => {
  const before = { chat: chat(), turns: [turn(1, 5, { state: "answered" })] };
  const log = update(before, [
    message("turn", turn(1, 4)),
    message("turn", turn(2, 6)),
    message("turn", turn(2, 7, { state: "answered" })),
    message("chat", chat({ seq: 7, state: "ended", reason: "idle" })),
    message("end", { state: "ended" }),
  ]);
  expect(log.turns.map((each) => [each.number, each.seq, each.state])).toEqual([
    [1, 5, "answered"],
    [2, 7, "answered"],
  ]);
  expect([log.chat.state, log.chat.reason]).toEqual(["ended", "idle"]);
  expect(before.turns).toHaveLength(1);
});

it("splits the answer where it differs, by characters", () => {
  const parted = turn(1, 1, { quantized: answer("a😀b c"), first_difference: 1, first_different_char: 3 });
  expect(splitAnswer(parted)).toEqual(["a😀b", " c"]);
  expect(splitAnswer(turn(1, 1, { quantized: answer("same") }))).toEqual(["same", ""]);
  expect(splitAnswer(turn(1, 1))).toEqual(["", ""]);
});

it("says where answers part, and why a chat ended", () => {
  expect(differenceText(turn(1, 1, { first_difference: 0 }))).toBe("differs from token 1 on");
  expect(differenceText(turn(1, 1))).toBe("no difference so far");
  expect(differenceText(turn(1, 1, { state: "answered" }))).toBe("no difference");
  expect(endText(chat({ reason: "no_worker" }))).toContain("No worker was available");
  const error = { code: "cannot_generate", message: "It is an encoder.", hint: "Only causal models can chat." };
  expect(endText(chat({ reason: "failed", error }))).toBe(
    "This chat failed. It is an encoder. Only causal models can chat.",
  );
  expect([isUnanswered(undefined), isUnanswered(turn(1, 1)), isUnanswered(turn(1, 1, { state: "failed" }))]).toEqual([
    false,
    true,
    false,
  ]);
});
