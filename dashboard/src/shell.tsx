import { Outlet, useLocation } from "@tanstack/react-router";
import { useEffect, useState, useSyncExternalStore } from "react";
import { post } from "./api/client";
import { connection } from "./api/connection";
import type { SignIn } from "./api/types";
import { Bell } from "./bell";
import { Link } from "./link";
import { isShown, menuFor, type Section, sectionOf } from "./menu";
import { Palette, usePalette } from "./palette";
import { useSession } from "./sign-in";
import { Announcer, announce } from "./ui/announcer";
import { applyTheme, readTheme, THEMES, type Theme } from "./ui/theme";

/** What is around every page: the menus, the search, and a notice while the service is away. */
export function Shell() {
  const { key, projects, signOut } = useSession();
  const path = useLocation({ select: ({ pathname }) => pathname });
  const palette = usePalette();
  const { main, sections, newJob } = menuFor(key.scopes);
  const section = sectionOf(sections, path);
  return (
    <>
      <a className="skip" href="#content">
        Skip to content
      </a>
      <header className="top">
        <Link to="/" className="brand">
          <svg viewBox="0 0 32 32" width="20" height="20" aria-hidden="true">
            <rect width="32" height="32" rx="7" />
            <path d="M7 18h4v7H7zM14 12h4v13h-4zM21 7h4v18h-4z" />
          </svg>
          Bitfoundry
        </Link>
        <nav aria-label="Main">
          {main.map(({ to, text }) => (
            <Link key={to} to={to} current={isShown(to, path) && "page"}>
              {text}
            </Link>
          ))}
          <span className="gap" />
          {sections.map(({ text, pages: [first] }) => (
            <Link key={text} to={first?.to ?? "/"} current={section?.text === text}>
              {text}
            </Link>
          ))}
        </nav>
        <div className="who">
          <button type="button" className="small" title="Search and commands" onClick={palette.open}>
            Search <kbd>Ctrl K</kbd>
          </button>
          {newJob && (
            <Link to={newJob.to} className="button small primary">
              {newJob.text}
            </Link>
          )}
          <Bell />
          <ThemeChoice />
          {projects.length > 1 && <ProjectChoice projects={projects} current={key.project_id} />}
          <span className="faint key-name" title="The key that you are signed in with">
            Key: {key.name}
          </span>
          <button type="button" className="small" onClick={() => void signOut()}>
            Sign out
          </button>
        </div>
      </header>
      {section && <SectionMenu section={section} path={path} />}
      <ConnectionNotice />
      <main id="content">
        <Outlet />
      </main>
      {palette.isOpen && <Palette onClose={palette.close} />}
      <Announcer />
    </>
  );
}

function SectionMenu({ section: { text, pages }, path }: { section: Section; path: string }) {
  return (
    <nav aria-label={text} className="section-menu">
      {pages.map((page) => (
        <Link key={page.to} to={page.to} current={page.to === path && "page"}>
          {page.text}
        </Link>
      ))}
    </nav>
  );
}

/** The projects of a person who signed in through a provider. The sign-in goes on in another one, with a new page. */
function ProjectChoice({ projects, current }: { projects: SignIn["projects"]; current: string }) {
  const change = async (id: string) => {
    await post<SignIn>("/v1/sign-in/project", { project_id: id }).catch(() => {}); // as a tab whose sign-in is over
    window.location.assign(import.meta.env.BASE_URL);
  };
  return (
    <select aria-label="Project" className="small" value={current} onChange={({ target }) => void change(target.value)}>
      {projects.map(({ id, name }) => (
        <option key={id} value={id}>
          {name}
        </option>
      ))}
    </select>
  );
}

const THEME_TEXTS: Record<Theme, string> = {
  system: "Theme: device",
  light: "Theme: light",
  dark: "Theme: dark",
};

function ThemeChoice() {
  const [theme, setTheme] = useState<Theme>(readTheme);
  return (
    <select
      aria-label="Color theme"
      className="small"
      value={theme}
      onChange={(event) => {
        const chosen = event.target.value as Theme;
        applyTheme(chosen);
        setTheme(chosen);
      }}
    >
      {THEMES.map((each) => (
        <option key={each} value={each}>
          {THEME_TEXTS[each]}
        </option>
      ))}
    </select>
  );
}

function ConnectionNotice() {
  const lost = useSyncExternalStore(connection.subscribe, connection.isLost);
  const [wasLost, setWasLost] = useState(false);
  useEffect(() => {
    if (lost) setWasLost(true);
    else if (wasLost) {
      announce("The service is responding again.");
      setWasLost(false);
    }
  }, [lost, wasLost]);
  if (!lost) return null;
  return (
    <div className="notice warn lost" role="status">
      ⚠ The service is not responding. This data may be out of date. The page reconnects automatically.
    </div>
  );
}
