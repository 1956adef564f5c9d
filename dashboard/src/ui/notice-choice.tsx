import { useEffect, useId, useState } from "react";
import { chooseNotices, noticeState } from "../notices";

/** The choice to be told by the browser when a run ends, where a browser can. It follows the browser's permission. */
export function NoticeChoice() {
  const [state, setState] = useState(noticeState);
  const hint = useId();
  useEffect(() => {
    const controller = new AbortController();
    const update = () => setState(noticeState());
    void navigator.permissions
      ?.query({ name: "notifications" })
      .then((permission) => permission.addEventListener("change", update, { signal: controller.signal }));
    return () => controller.abort();
  }, []);
  if (state === "unavailable") return null;
  const isBlocked = state === "blocked";
  return (
    <div className="notice-choice">
      <label>
        <input
          type="checkbox"
          checked={state === "on"}
          disabled={isBlocked}
          aria-describedby={isBlocked ? hint : undefined}
          onChange={(event) => void chooseNotices(event.target.checked).then(setState)}
        />{" "}
        Notify me when a run ends
      </label>
      {isBlocked && (
        <div className="sub" id={hint}>
          The browser blocks notifications. Allow them in its settings for this site.
        </div>
      )}
    </div>
  );
}
