import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { watchVisibility } from "./api/query";
import { App } from "./app";
import "./styles.css";
import { applyTheme, readTheme } from "./ui/theme";

applyTheme(readTheme());
watchVisibility();
const root = document.getElementById("root");
if (root) {
  createRoot(root, { onCaughtError: (error) => console.warn(error) }).render(
    <StrictMode>
      <App />
    </StrictMode>,
  );
}
