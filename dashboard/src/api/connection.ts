// Whether the service responds. Every request reports to it, and one notice shows it.
type Listener = () => void;

let lost = false;
const listeners = new Set<Listener>();

export const connection = {
  isLost: () => lost,
  subscribe(listener: Listener) {
    listeners.add(listener);
    return () => {
      listeners.delete(listener);
    };
  },
  report(nowLost: boolean) {
    if (nowLost === lost) return;
    lost = nowLost;
    for (const listener of listeners) listener();
  },
};
