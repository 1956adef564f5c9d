// The measured peak of memory beside the planned one, and why the two differ.
import type { Summary } from "../../api/types";
import { formatBytes, formatPercent } from "../../format";

type Memory = Pick<Summary, "memory_by_phase" | "peak_memory_bytes" | "planned_peak_memory_bytes">;

const NOTABLE = 0.05;
const WHY_MORE =
  "The plan estimates, from the shapes of the tensors, the weights and activations that are in memory at once, and adds " +
  "a fixed amount for Python and its libraries. The measurement is the largest resident size of the process. That also " +
  "counts pages of files that are mapped into memory, which the system can reclaim, and freed memory that the " +
  "allocator has kept.";

/** "950 MB in verify, planned 528 MB (+80 %)", and a sentence about the plan where more was measured. */
export function memoryText({ memory_by_phase: phases, peak_memory_bytes, planned_peak_memory_bytes }: Memory) {
  const [name, use] = Object.entries(phases ?? {}).reduce(
    (most, each) => (each[1].peak_memory_bytes >= most[1].peak_memory_bytes ? each : most),
    ["", { peak_memory_bytes, planned_peak_memory_bytes }],
  );
  const over = use.peak_memory_bytes / use.planned_peak_memory_bytes - 1;
  const text = `${formatBytes(use.peak_memory_bytes)}${name && ` in ${name}`}, planned ${formatBytes(use.planned_peak_memory_bytes)} (${formatPercent(over, 0)})`;
  return { text, why: over > NOTABLE ? WHY_MORE : "" };
}
