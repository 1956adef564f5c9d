// Notifications of the browser when a run ends while the page is hidden. The choice is this browser's alone.
import type { Job } from "./api/types";
import { nameOf } from "./names";
import { FINAL_STATES, STATES } from "./ui/states";

const STORAGE_KEY = "bitfoundry.notices";

/** `blocked`: the browser was told to show none of this site's. `unavailable`: without HTTPS it cannot be asked. */
export type NoticeState = "on" | "off" | "blocked" | "unavailable";

export function noticeState(): NoticeState {
  if (!window.isSecureContext || !("Notification" in window)) return "unavailable";
  if (Notification.permission === "denied") return "blocked";
  return Notification.permission === "granted" && localStorage.getItem(STORAGE_KEY) === "on" ? "on" : "off";
}

/** Turns notices on, for which the browser may ask the person, or off. */
export async function chooseNotices(on: boolean): Promise<NoticeState> {
  if (!on) localStorage.removeItem(STORAGE_KEY);
  else if ((await Notification.requestPermission()) === "granted") localStorage.setItem(STORAGE_KEY, "on");
  return noticeState();
}

/** "nightly: Succeeded", and below it the goal if it was missed, the verdict with its reason, or the error. */
export function noticeText(job: Job): { title: string; body: string } {
  const { verdict, goal } = job.summary ?? {};
  const missed = goal && !goal.is_met ? `goal missed: ${goal.why}. ` : "";
  const body = verdict
    ? `${missed}${verdict.sentence ?? `${verdict.level}: ${verdict.reason}`}`
    : (job.error?.message ?? "");
  return { title: `${nameOf(job)}: ${STATES[job.state].text}`, body };
}

/** Shows a notification for each of the runs that has ended, if they are on and nobody sees the page. */
export function notifyEnds(changed: Job[], open: (job: Job) => void) {
  if (!document.hidden || noticeState() !== "on") return;
  for (const job of changed.filter(({ state }) => FINAL_STATES.has(state))) {
    const notice = show(job);
    if (!notice) return;
    notice.onclick = () => {
      window.focus();
      open(job);
      notice.close();
    };
  }
}

function show(job: Job): Notification | undefined {
  const { title, body } = noticeText(job);
  try {
    return new Notification(title, { body, tag: job.id }); // of several tabs one is shown
  } catch {
    return undefined; // browsers of phones refuse it to pages
  }
}
