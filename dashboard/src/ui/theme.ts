// Light, dark, or as the system has it.
export type Theme = "system" | "light" | "dark";
export const THEMES: Theme[] = ["system", "light", "dark"];

const KEPT_AS = "bitfoundry.theme";

export function readTheme(): Theme {
  const kept = localStorage.getItem(KEPT_AS);
  return kept === "light" || kept === "dark" ? kept : "system";
}

export function applyTheme(theme: Theme) {
  if (theme === "system") {
    localStorage.removeItem(KEPT_AS);
    delete document.documentElement.dataset.theme;
  } else {
    localStorage.setItem(KEPT_AS, theme);
    document.documentElement.dataset.theme = theme;
  }
}
