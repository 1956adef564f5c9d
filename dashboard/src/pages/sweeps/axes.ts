// The axes of a sweep as columns.
import type { Job } from "../../api/types";
import { STATE_ORDER, STATES } from "../../ui/states";

type Matrix = Record<string, unknown[]>;

/** A short name for each axis, by its pointer: the last part, or the whole pointer if two end alike. */
export function axisNames(matrix: Matrix): Map<string, string> {
  const last = (pointer: string) => pointer.split("/").at(-1) ?? pointer;
  const names = Object.keys(matrix).map(last);
  return new Map(
    Object.keys(matrix).map((pointer) => {
      const name = last(pointer);
      return [pointer, names.filter((each) => each === name).length > 1 ? pointer : name];
    }),
  );
}

/** "preset (2) × num_samples (3)" */
export const axesText = (matrix: Matrix) =>
  [...axisNames(matrix)].map(([pointer, name]) => `${name} (${matrix[pointer]?.length ?? 0})`).join(" × ");

/** The value of a job on an axis as text. */
export function valueText(job: Pick<Job, "sweep_values">, pointer: string): string {
  const value = (job.sweep_values as Record<string, unknown> | null)?.[pointer];
  return typeof value === "string" ? value : (JSON.stringify(value) ?? "–");
}

/** "2 succeeded, 1 running" */
export const countsText = (counts: Record<string, number>) =>
  STATE_ORDER.filter((state) => counts[state])
    .map((state) => `${counts[state]} ${STATES[state].text.toLowerCase()}`)
    .join(", ");
