import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

// `make up` in another terminal, then `npm run dev`: the page reloads on every change.
const api = "http://127.0.0.1:8765";

export default defineConfig({
  base: "/ui/",
  plugins: [react()],
  build: { outDir: "../api/ui", emptyOutDir: true, assetsInlineLimit: 0, sourcemap: false },
  server: { proxy: { "/v1": api, "/healthz": api } },
  test: { include: ["src/**/*.test.{ts,tsx}"] },
});
