// One polite live region for the whole page. Changes of state are said, not every percent.
import { useEffect, useState } from "react";

let say: (text: string) => void = () => {};

export function announce(text: string) {
  say(text);
}

export function Announcer() {
  const [text, setText] = useState("");
  useEffect(() => {
    say = setText;
    return () => {
      say = () => {};
    };
  }, []);
  return (
    <div role="status" aria-live="polite" className="hidden">
      {text}
    </div>
  );
}
