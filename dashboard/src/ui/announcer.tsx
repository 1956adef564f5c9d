// One polite live region for the whole page. It announces changes of state, not every step of progress.
import { useEffect, useState } from "react";

let setAnnouncement: (text: string) => void = () => {};

export function announce(text: string) {
  setAnnouncement(text);
}

export function Announcer() {
  const [text, setText] = useState("");
  useEffect(() => {
    setAnnouncement = setText;
    return () => {
      setAnnouncement = () => {};
    };
  }, []);
  return (
    <div role="status" aria-live="polite" className="hidden">
      {text}
    </div>
  );
}
