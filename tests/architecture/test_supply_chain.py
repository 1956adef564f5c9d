"""What is installed is what was looked at: versions and hashes of the containers, and floors below known holes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = {"service": ("service", "tracing"), "worker": ("service", "engine", "eval", "tracing")}
ENTRY = re.compile(
    r"^([a-z0-9._-]+)==(\S+)(?: ;[^\\\n]*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# The first version without the hole that is named. What we use of each reads files or requests of strangers.
FLOORS = {
    "torch": ("2.10", "CVE-2026-24747: weights_only unpickling"),
    "transformers": ("5.3", "CVE-2026-4372: config.json names code to run"),
    "jinja2": ("3.1.6", "CVE-2025-27516: a way out of the sandbox of templates"),
    "starlette": ("0.49.1", "CVE-2025-62727: ranges that take quadratic time"),
    "onnx": ("1.21", "CVE-2026-27489: external data outside of the folder"),
    "celery": ("5.2.2", "CVE-2021-23727: results that run code"),
    "python-multipart": ("0.0.18", "CVE-2024-53981: line breaks that stall a form"),
    "h11": ("0.16", "CVE-2025-43859: chunked bodies that are read in two ways"),
    "cryptography": ("44.0.1", "CVE-2024-12797: OpenSSL in the wheels"),
    "aiohttp": ("3.13.3", "CVE-2025-69223: compressed bodies that unfold without bound"),
    "pyarrow": ("14.0.1", "CVE-2023-47248: IPC files that run code"),
    "urllib3": ("2.6.3", "CVE-2026-21441: redirects that unfold without bound"),
}


def pins() -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    return {plain(name): version for name, version in found}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("image", LOCKS)
def test_every_file_that_an_image_installs_has_a_hash(image: str) -> None:
    text = (ROOT / "locks" / f"{image}.txt").read_text()
    locked = {plain(name): version for name, version, _ in ENTRY.findall(text)}
    listed = re.findall(r"^[a-z].*", text, flags=re.MULTILINE)
    assert len(locked) == len(listed) > 50, "an entry without a hash"
    tested = pins()
    assert {name: tested.get(name) for name in locked} == locked, "run `make locks`"
    wanted = [*PROJECT["dependencies"]]
    wanted += [line for extra in LOCKS[image] for line in PROJECT["optional-dependencies"][extra]]
    here = {"sys_platform": "linux", "python_version": "3.12"}
    needed = {plain(one.name) for one in map(Requirement, wanted) if one.marker is None or one.marker.evaluate(here)}
    assert needed - locked.keys() <= {"bitfoundry", "torch"}, "run `make locks`"


@pytest.mark.parametrize("dockerfile", ["Dockerfile.cuda", "Dockerfile.rocm"])
def test_images_install_nothing_without_a_hash_but_torch(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text().replace("\\\n", " ")
    commands = re.findall(r"pip install ([^&\n]*)", text)
    by_hash = [command for command in commands if "--require-hashes" in command]
    others = [command for command in commands if command not in by_hash]
    assert by_hash and all("--no-deps" in command for command in by_hash)
    assert all("${TORCH}" in command or command.strip() == "--no-deps ." for command in others), others


@pytest.mark.parametrize("package", FLOORS)
def test_no_version_with_a_known_hole(package: str) -> None:
    floor, hole = FLOORS[package]
    assert Version(pins()[package]) >= Version(floor), hole


@pytest.mark.parametrize("folder", ["dashboard", "tests/support/oidc"])
def test_what_npm_installs_has_hashes(folder: str) -> None:
    import json

    packages = json.loads((ROOT / folder / "package-lock.json").read_text())["packages"]
    assert all("integrity" in entry for name, entry in packages.items() if name and not entry.get("link"))
