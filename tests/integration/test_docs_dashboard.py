"""The page about the dashboard: its example signs in and out, its names are those of the page and the settings."""

import re
from pathlib import Path

from api.settings import Settings
from tests.support.docs import DOCS, Shell, read_page
from tests.support.service import ROOT, Server

PAGE = (DOCS / "how-to" / "dashboard.md").read_text()


def test_the_shell_signs_in_and_out(server: Server, tmp_path: Path) -> None:
    printed = read_page("how-to/dashboard.md", tmp_path, **server.environment).output
    assert '"has_more":false' in printed
    shell = Shell(tmp_path, server.environment)
    again = shell.run('curl -sS -b cookies.txt "$BITFOUNDRY_URL/v1/jobs"')
    shell.close()
    assert '"code":"unauthorized"' in again  # signed out in the service, whatever the file of cookies says


def test_it_names_every_page_of_the_menu() -> None:
    menu = re.findall(r'text: "([\w ]+)"', (ROOT / "dashboard" / "src" / "menu.ts").read_text())
    assert len(menu) == 16
    for name in menu:
        assert re.search(rf"^\|.*\b{name}\b", PAGE, flags=re.MULTILINE), name


def test_the_time_of_a_sign_in_is_true() -> None:
    assert Settings.model_fields["sign_in_s"].default == 12 * 3600
    assert "BITFOUNDRY_SIGN_IN_S" in PAGE
