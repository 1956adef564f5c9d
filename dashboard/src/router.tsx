// The pages below /ui, by TanStack Router. The code of a page is loaded when it is first opened, except the list's.
import { createRootRoute, createRoute, createRouter, notFound, redirect } from "@tanstack/react-router";
import { lazy } from "react";
import { Link } from "./link";
import { Runs } from "./pages/runs/runs";
import {
  BASE,
  parseSearch,
  readAudit,
  readCompare,
  readDatasets,
  readModels,
  readNewJob,
  readQueue,
  readRegistry,
  readRun,
  readRuns,
  stringifySearch,
} from "./search";
import { Shell } from "./shell";
import { Empty, Loading, Title } from "./ui/basics";
import { PageFailure } from "./ui/page-failure";

const root = createRootRoute({ component: Shell, notFoundComponent: NotFound });
const getParentRoute = () => root;

const pages = [
  createRoute({ getParentRoute, path: "/", component: Runs, validateSearch: readRuns }),
  createRoute({
    getParentRoute,
    path: "/jobs",
    validateSearch: readRuns,
    beforeLoad: ({ search }) => {
      throw redirect({ to: "/", search, replace: true });
    },
  }),
  createRoute({
    getParentRoute,
    path: "/jobs/new",
    component: lazy(() => import("./pages/new-job/new-job")),
    validateSearch: readNewJob,
  }),
  createRoute({
    getParentRoute,
    path: "/jobs/$id",
    component: lazy(() => import("./pages/run/run")),
    validateSearch: readRun,
    remountDeps: ({ params }) => params,
    beforeLoad: ({ params }) => {
      if (!/^job_[0-9a-f]{32}$/.test(params.id)) throw notFound();
    },
  }),
  createRoute({
    getParentRoute,
    path: "/models",
    component: lazy(() => import("./pages/models/models")),
    validateSearch: readModels,
  }),
  createRoute({
    getParentRoute,
    path: "/compare",
    component: lazy(() => import("./pages/compare/compare")),
    validateSearch: readCompare,
  }),
  createRoute({
    getParentRoute,
    path: "/datasets",
    component: lazy(() => import("./pages/datasets")),
    validateSearch: readDatasets,
  }),
  createRoute({
    getParentRoute,
    path: "/registry",
    component: lazy(() => import("./pages/registry/registry")),
    validateSearch: readRegistry,
  }),
  createRoute({
    getParentRoute,
    path: "/audit",
    component: lazy(() => import("./pages/audit")),
    validateSearch: readAudit,
  }),
  createRoute({ getParentRoute, path: "/workers", component: lazy(() => import("./pages/workers")) }),
  createRoute({ getParentRoute, path: "/keys", component: lazy(() => import("./pages/keys")) }),
  createRoute({ getParentRoute, path: "/webhooks", component: lazy(() => import("./pages/webhooks")) }),
  createRoute({ getParentRoute, path: "/members", component: lazy(() => import("./pages/members")) }),
  createRoute({ getParentRoute, path: "/project", component: lazy(() => import("./pages/project")) }),
  createRoute({ getParentRoute, path: "/sweeps/$id", component: lazy(() => import("./pages/sweeps/sweep")) }),
  createRoute({
    getParentRoute,
    path: "/queue",
    validateSearch: readQueue,
    component: lazy(() => import("./pages/queue")),
  }),
  createRoute({ getParentRoute, path: "/system", component: lazy(() => import("./pages/system")) }),
  // for those who change the dashboard
  createRoute({ getParentRoute, path: "/components", component: lazy(() => import("./pages/components/components")) }),
] as const;

function NotFound() {
  return (
    <>
      <Title>Page not found</Title>
      <Empty>
        This page does not exist. <Link to="/">View all runs</Link>
      </Empty>
    </>
  );
}

export const router = createRouter({
  routeTree: root.addChildren(pages),
  basepath: BASE,
  parseSearch,
  stringifySearch,
  defaultPendingComponent: Loading,
  defaultErrorComponent: PageFailure,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
