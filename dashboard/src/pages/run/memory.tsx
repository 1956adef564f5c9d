import { useMemo, useState } from "react";
import type { Summary } from "../../api/types";
import type { Axis } from "../../charts/scale";
import { Scatter, type Series } from "../../charts/scatter";
import { formatBytes, formatDuration, plural } from "../../format";
import { memoryText } from "./memory-text";

const TIME: Axis = { format: formatDuration };
const BYTES: Axis = { format: formatBytes, fromZero: true };

/** Memory of the engine's processes, as reported with its progress, against the plan. */
export function MemoryCard({ memory, summary }: { memory: { at: number; bytes: number }[]; summary?: Summary | null }) {
  const [picked, setPicked] = useState<string | null>(null);
  const series = useMemo<Series[]>(() => {
    const start = memory[0]?.at ?? 0;
    const points = memory.map(({ at, bytes }, index) => ({
      x: (at - start) / 1000,
      y: bytes,
      name: `point ${index + 1}`,
    }));
    return [{ name: "memory", look: 0, points }];
  }, [memory]);
  if (memory.length < 2 && !summary) return null;
  const said = summary && memoryText(summary);
  return (
    <section className="card" aria-label="Memory">
      <h2>Memory</h2>
      {said && <p>Peak: {said.text}</p>}
      {said?.why && <p className="hint">{said.why}</p>}
      {memory.length > 1 && said && (
        <p className="hint">The chart shows the main process at each step. The peak counts all processes at once.</p>
      )}
      {memory.length > 1 && (
        <Scatter
          label={`Engine memory over time, ${plural(memory.length, "point")}`}
          series={series}
          xLabel="time"
          yLabel="memory"
          xAxis={TIME}
          yAxis={BYTES}
          limit={summary ? { y: summary.planned_peak_memory_bytes, text: "planned peak" } : undefined}
          joined
          radius={2.5}
          onPick={setPicked}
          picked={picked}
        />
      )}
    </section>
  );
}
