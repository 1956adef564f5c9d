// The address of a comparison, and its largest number of runs.

export const MAX_COMPARED = 8;

export const compareAddress = (ids: string[]) =>
  `/compare${ids.length ? "?" : ""}${ids.map((id) => `job=${id}`).join("&")}`;
