import { useMemo, useState } from "react";
import { Scatter, type Series } from "../../charts/scatter";
import { formatBytes, formatDuration } from "../../format";

/** Memory of the engine's processes, as reported with its progress. */
export function MemoryCard({ memory }: { memory: { at: number; bytes: number }[] }) {
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
  if (memory.length < 2) return null;
  return (
    <section className="card">
      <h2>Memory over time</h2>
      <Scatter
        label="Engine memory over time"
        series={series}
        xLabel="time"
        yLabel="memory"
        formatX={(value) => formatDuration(value)}
        formatY={formatBytes}
        joined
        radius={2.5}
        onPick={setPicked}
        picked={picked}
      />
    </section>
  );
}
