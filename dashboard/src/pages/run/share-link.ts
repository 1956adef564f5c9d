// Where a link to a report leads.

const LOOPBACK = new Set(["127.0.0.1", "localhost", "[::1]"]);

/** Whether the address leads to this machine from any machine, so that nobody else can open it. */
export const isOfThisMachine = (url: string) => LOOPBACK.has(new URL(url).hostname);
