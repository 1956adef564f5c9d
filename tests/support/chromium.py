"""A Chromium for the tests: the system's if there is one, else the one that `npm ci` brought."""

from __future__ import annotations

import base64
import fcntl
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from playwright.sync_api import Browser, Error, Page, sync_playwright

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""By how many pixels a page is wider than its window."""
DASHBOARD = ROOT / "dashboard"
UNPACKED = DASHBOARD / "node_modules" / ".chromium"
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run"
).split()
# Its own looks for fonts in /tmp/fonts alone, wherever it was unpacked; without any it does not start.
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{own}</dir><dir>/usr/share/fonts</dir><cachedir>{cache}</cachedir></fontconfig>
"""
FONT_ARCHIVE = DASHBOARD / "node_modules" / "@sparticuz" / "chromium" / "bin" / "fonts.tar.br"
FONT = "OpenSans-Regular.ttf"
UNPACK_FONTS = "process.stdout.write(zlib.brotliDecompressSync(fs.readFileSync(process.argv[1])))"
SET_FONT = """async font => {
  const bytes = Uint8Array.from(atob(font), letter => letter.charCodeAt(0));
  document.fonts.add(await new FontFace("Layout", bytes, {weight: "1 1000"}).load());
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { font-family: Layout !important; text-rendering: geometricPrecision !important; }");
  document.adoptedStyleSheets = [sheet];
}"""
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Script that ends when the page has drawn what it had to draw."""
COUNT_WORK = """(() => {
  const underWay = (window.underWay = new Set());
  const [request, start, stop] = [window.fetch, window.setTimeout, window.clearTimeout];
  window.fetch = async (url, init) => {
    if (String(url).includes("/stream")) return request(url, init);
    const mark = {};
    underWay.add(mark);
    try {
      const response = await request(url, init);
      response.clone().arrayBuffer().catch(() => {}).finally(() => underWay.delete(mark));
      return response;
    } catch (error) {
      underWay.delete(mark);
      throw error;
    }
  };
  window.setTimeout = (act, ms, ...given) => {
    const timer = start(() => (underWay.delete(timer), act(...given)), ms);
    if (!(ms >= 1000)) underWay.add(timer);
    return timer;
  };
  window.clearTimeout = timer => (underWay.delete(timer), stop(timer));
})()"""
"""Script for a page before it starts: its requests and its timers below a second are in ``underWay`` until they end.

Streams do not count, which end when a job does, nor do longer timers, after which a page asks again."""
IDLE = f"""async () => {{
  for (let i = 0; i < 3; i++) {{
    await {DRAWN};
    if (underWay.size) return false;
  }}
  return true;
}}"""
HOW = "Run the tests with `make test`, which fetches one, or install one: `apt-get install -y chromium`."


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless browser. Without any this is an error that says what to do, never a skipped test."""
    path, environment = _find()
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, env=environment)
        except Error as error:
            raise RuntimeError(f"{path} does not start.\n{HOW}") from error
        yield browser
        browser.close()


def _find() -> tuple[str, dict[str, str]]:
    """(program, environment)."""
    for name in NAMES:
        if found := shutil.which(name):
            return found, dict(os.environ)
    if not (DASHBOARD / "node_modules" / "@sparticuz").is_dir():
        raise RuntimeError(f"There is no Chromium for the tests of the dashboard. {HOW}")
    return _unpack()


def _unpack() -> tuple[str, dict[str, str]]:
    """Unpack the browser where it is not yet; processes of one run of the tests wait for each other here."""
    UNPACKED.mkdir(exist_ok=True)
    with (UNPACKED / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _unpack_alone()


def _unpack_alone() -> tuple[str, dict[str, str]]:
    environment = os.environ | {"TMPDIR": str(UNPACKED)}
    command = [_node(), "chromium.mjs"]
    done = subprocess.run(command, cwd=DASHBOARD, env=environment, capture_output=True, text=True, check=True)
    fonts = UNPACKED / "fonts.conf"
    fonts.write_text(FONTS.format(own=UNPACKED / "fonts", cache=UNPACKED / "fonts-cache"))
    ours = {"LD_LIBRARY_PATH": str(UNPACKED / "al2023" / "lib"), "FONTCONFIG_FILE": str(fonts)}
    return done.stdout.strip(), os.environ | ours


def wait_until_idle(page: Page) -> None:
    """Wait until a page that began with ``COUNT_WORK`` has what it asked for and has drawn it."""
    wait_until(lambda: page.evaluate(IDLE), note=lambda: f"{page.url} still asks for something")


def set_font(page: Page) -> None:
    """Set the page in the font that comes with the pinned npm package, unhinted: as wide on every machine."""
    page.evaluate(SET_FONT, base64.b64encode(_read_font()).decode())


@cache
def _read_font() -> bytes:
    command = [_node(), "-e", UNPACK_FONTS, str(FONT_ARCHIVE)]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        (name,) = [name for name in files.getnames() if name.endswith(FONT)]
        font = files.extractfile(name)
        assert font is not None
        return font.read()


def _node() -> str:
    return shutil.which("node", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "node"
