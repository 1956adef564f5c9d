import { type ComponentType, lazy, Suspense, useEffect, useMemo, useState, useSyncExternalStore } from "react";
import { connection } from "./api/connection";
import { capitalize } from "./format";
import { isShown, menuFor, type Section, sectionOf } from "./menu";
import { Runs } from "./pages/runs/runs";
import { Palette, usePalette } from "./palette";
import { Link, type Place, usePlace } from "./router";
import { SessionProvider, SignInPage, useSignIn } from "./sign-in";
import { Announcer, announce } from "./ui/announcer";
import { Empty, Loading, Title } from "./ui/basics";
import { PageBoundary } from "./ui/boundary";
import { applyTheme, readTheme, THEMES, type Theme } from "./ui/theme";

type Page = ComponentType<{ place: Place; id: string }>;

const Run = lazy(() => import("./pages/run/run"));
const NewJob = lazy(() => import("./pages/new-job/new-job"));
const Models = lazy(() => import("./pages/models/models"));
const Compare = lazy(() => import("./pages/compare/compare"));
const Workers = lazy(() => import("./pages/workers"));
const Datasets = lazy(() => import("./pages/datasets"));
const Keys = lazy(() => import("./pages/keys"));
const Webhooks = lazy(() => import("./pages/webhooks"));
const Audit = lazy(() => import("./pages/audit"));
const Project = lazy(() => import("./pages/project"));
const Queue = lazy(() => import("./pages/queue"));
const System = lazy(() => import("./pages/system"));
const Components = lazy(() => import("./pages/components/components")); // for those who change the dashboard

const ROUTES: [RegExp, Page][] = [
  [/^\/(?:jobs\/?)?$/, Runs],
  [/^\/jobs\/new$/, NewJob],
  [/^\/jobs\/(job_[0-9a-f]{32})$/, Run],
  [/^\/models$/, Models],
  [/^\/compare$/, Compare],
  [/^\/workers$/, Workers],
  [/^\/datasets$/, Datasets],
  [/^\/keys$/, Keys],
  [/^\/webhooks$/, Webhooks],
  [/^\/audit$/, Audit],
  [/^\/project$/, Project],
  [/^\/queue$/, Queue],
  [/^\/system$/, System],
  [/^\/components$/, Components],
];

export function App() {
  const { door, signIn, signOut } = useSignIn();
  const session = useMemo(
    () =>
      typeof door === "object"
        ? { key: door.key, can: (scope: string) => door.key.scopes.includes(scope), signOut }
        : null,
    [door, signOut],
  );
  if (door === "unknown") return <Loading />;
  if (door === "unreachable") return <Loading what="The service is not responding. Retrying" />;
  if (!session) return <SignInPage signIn={signIn} />;
  return (
    <SessionProvider value={session}>
      <Shell keyName={session.key.name} scopes={session.key.scopes} signOut={signOut} />
    </SessionProvider>
  );
}

function Shell({ keyName, scopes, signOut }: { keyName: string; scopes: string[]; signOut: () => Promise<void> }) {
  const place = usePlace();
  const palette = usePalette();
  const { main, sections, newJob } = menuFor(scopes);
  const section = sectionOf(sections, place.path);
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
            <Link key={to} to={to} aria-current={isShown(to, place.path) ? "page" : undefined}>
              {text}
            </Link>
          ))}
          <span className="gap" />
          {sections.map(({ text, pages: [first] }) => (
            <Link key={text} to={first?.to ?? "/"} aria-current={section?.text === text ? "true" : undefined}>
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
          <ThemeChoice />
          <span className="faint key-name" title="The API key you are signed in with">
            {keyName}
          </span>
          <button type="button" className="small" onClick={() => void signOut()}>
            Sign out
          </button>
        </div>
      </header>
      {section && <SectionMenu section={section} path={place.path} />}
      <ConnectionNotice />
      <main id="content">
        <PageBoundary key={place.path}>
          <Suspense fallback={<Loading />}>
            <Routed place={place} />
          </Suspense>
        </PageBoundary>
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
        <Link key={page.to} to={page.to} aria-current={page.to === path ? "page" : undefined}>
          {page.text}
        </Link>
      ))}
    </nav>
  );
}

function Routed({ place }: { place: Place }) {
  for (const [pattern, Page] of ROUTES) {
    const match = pattern.exec(place.path);
    if (match) return <Page key={place.path} place={place} id={match[1] ?? ""} />;
  }
  return (
    <>
      <Title>Page not found</Title>
      <Empty>
        This page does not exist. <Link to="/">View all runs</Link>
      </Empty>
    </>
  );
}

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
          {capitalize(each)}
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
