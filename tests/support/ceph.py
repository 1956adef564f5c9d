"""A real object store on this machine: Ceph's S3 server, from Debian's ceph-mon, ceph-osd and radosgw. In memory."""

import base64
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import obstore
from obstore.store import from_url

from tests.support.waiting import wait_until

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI-not-in-any-log"
USER = "tester"


class Store:
    """A running store. ``environment`` has its address and the keys of its only user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = folder / "ceph.conf"
        self._monitor, self._port = _free_port(), _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }
        self._config.write_text(
            f"""[global]
fsid = {uuid.uuid4()}
mon host = v1:127.0.0.1:{self._monitor}
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
run dir = {folder}
pid file = {folder}/$name.pid
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
rgw frontends = beast endpoint=127.0.0.1:{self._port}
"""
        )

    def start(self) -> None:
        for name in ("mon", "osd", "rgw"):
            (self._folder / name).mkdir()
        (self._folder / "keyring").touch()
        fsid = self._config.read_text().split()[3]
        place = f"[v1:127.0.0.1:{self._monitor}]"
        self.ask("monmaptool", "--create", "--fsid", fsid, "--addv", "a", place, str(self._folder / "map"))
        self.ask("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(self._folder / "map"))
        self.ask("ceph-mon", "-i", "a")
        disk = str(uuid.uuid4())
        self.ask("ceph", "osd", "create", disk, "0")
        self.ask("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self.ask("ceph-osd", "-i", "0")
        self.ask("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=here")
        self.admin("user", "create", f"--uid={USER}", f"--display-name={USER}", f"--access-key={KEY}",
                   f"--secret-key={SECRET}")  # fmt: skip
        self.ask("radosgw", "-n", "client.rgw")
        wait_until(self._answers)

    def stop(self) -> None:
        for name in ("client.rgw", "osd.0", "mon.a"):
            file = self._folder / f"{name}.pid"
            if file.exists():
                os.kill(self._pid(name), signal.SIGKILL)

    def hold(self) -> None:
        """Let the server accept connections and answer nothing, until ``go_on``."""
        os.kill(self._pid("client.rgw"), signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._pid("client.rgw"), signal.SIGCONT)

    def put(self, folder: Path, url: str) -> None:
        """Copy the files of a folder to ``s3://bucket/folder``."""
        store = from_url(url, client_options={"allow_http": True}, config=self._keys)  # type: ignore[arg-type]
        for path in folder.rglob("*"):
            if path.is_file():
                obstore.put(store, path.relative_to(folder).as_posix(), path)

    def _pid(self, name: str) -> int:
        return int((self._folder / f"{name}.pid").read_text())

    @property
    def _keys(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.environment.items()}

    def ask(self, program: str, *arguments: str) -> str:
        """Run a command of Ceph and return what it prints."""
        command = [program, "-c", str(self._config), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    def admin(self, *arguments: str) -> str:
        return self.ask("radosgw-admin", *arguments)

    def make_bucket(self, name: str) -> None:
        """Make a bucket: obstore cannot. The signature is that of S3's version 2, which fits in a line."""
        date = formatdate(usegmt=True)
        signature = hmac.new(SECRET.encode(), f"PUT\n\n\n{date}\n/{name}".encode(), hashlib.sha1).digest()
        headers = {"Date": date, "Authorization": f"AWS {KEY}:{base64.b64encode(signature).decode()}"}
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return True
        except OSError:
            return False


@contextmanager
def running_store(folder: Path) -> Iterator[Store]:
    missing = [name for name in ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin") if shutil.which(name) is None]
    assert not missing, f"{missing} not installed: as root, `make ceph-for-tests`"
    folder.mkdir(parents=True)
    store = Store(folder)
    try:
        store.start()
        yield store
    finally:
        store.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
