"""Runs tests in a small virtual machine with another kernel: Debian's, with cgroup v2 and an older Landlock.

    python -m tests.machine                                  # control groups, and the sandbox of Linux 6.1
    python -m tests.machine tests/attack/test_b_memory.py    # these tests, with arguments of pytest

Many machines that run the tests have no memory controller of cgroup v2, and all have a Landlock newer than that of
Debian 12. Here the kernel itself is the judge. The machine is emulated, so it needs no rights and is twenty times
slower; it sees this machine's files and changes none. Needs Debian with qemu-system-x86, busybox-static and cpio.
"""

from __future__ import annotations

import argparse
import gzip
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.service import ROOT

KERNEL = re.compile(r"linux-image-6\.1\.0-(\d+)-amd64")
MODULES = (
    "virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "netfs", "fscache",
    "9pnet", "9pnet_virtio", "9p",
)  # fmt: skip
CHECKS = ("tests/machine/control_groups.py", "tests/attack/test_a_engine.py")
RESULT = re.compile(r"^machine: pytest exited with (\d+)", re.M)
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for name in {modules}; do insmod /$name.ko; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose host /host || poweroff -f
mount -t proc proc /host/proc; mount -t sysfs sys /host/sys; mount --bind /dev /host/dev
mkdir -p /dev/shm; mount -t tmpfs tmp /host/dev/shm; mount -t tmpfs tmp /host/tmp; mount -t tmpfs run /host/run
mount -t cgroup2 cgroup /host/sys/fs/cgroup
ip link set lo up
cp /container.sh /tests.sh /host/tmp
chroot /host /bin/bash /tmp/container.sh
poweroff -f
"""
# A container has a group of its own, which is the root of all that it sees.
CONTAINER = """
export PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/tmp/home LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
mkdir $HOME; uname -sr
echo +memory > /sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/box; echo $$ > /sys/fs/cgroup/box/cgroup.procs
unshare --cgroup --mount bash /tmp/tests.sh
"""
TESTS = """
umount /sys/fs/cgroup; mount -t cgroup2 cgroup /sys/fs/cgroup
cd {root} && PYTHONPATH={root} {python} -m pytest -n 0 --color no -p no:cacheprovider {arguments}
echo "machine: pytest exited with $?"
"""


def kernel_in(folder: Path) -> tuple[Path, Path]:
    """Fetch and unpack the newest package that ``KERNEL`` matches. Return its image and the folder of its modules."""
    names = subprocess.run(["apt-cache", "pkgnames", "linux-image-6.1"], capture_output=True, text=True, check=True)
    found = [match for name in names.stdout.split() if (match := KERNEL.fullmatch(name))]
    if not found:
        raise SystemExit("there is no package of Linux 6.1 here: this needs Debian 12, and `apt-get update`")
    newest = max(found, key=lambda match: int(match[1]))[0]
    subprocess.run(["apt-get", "download", newest], cwd=folder, check=True, capture_output=True)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    return next((folder / "boot").glob("vmlinuz-*")), folder / "lib" / "modules"


def make_initrd(folder: Path, modules: Path, arguments: list[str]) -> Path:
    """Write the archive with which the kernel starts: busybox, the modules, and what to run."""
    tree = folder / "initrd"
    for name in ("bin", "proc", "sys", "dev", "host"):
        (tree / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin")
    for name in MODULES:
        shutil.copy(next(modules.rglob(f"{name}.ko")), tree)
    (tree / "container.sh").write_text(CONTAINER)
    (tree / "tests.sh").write_text(
        TESTS.format(root=shlex.quote(str(ROOT)), python=shlex.quote(sys.executable), arguments=shlex.join(arguments))
    )
    (tree / "init").write_text(INIT.format(modules=" ".join(MODULES)))
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in (tree, *tree.rglob("*"))).encode()
    packed = subprocess.run(["cpio", "-o", "-H", "newc"], cwd=tree, input=names, capture_output=True, check=True)
    archive = folder / "initrd.gz"
    archive.write_bytes(gzip.compress(packed.stdout, 1))
    return archive


def run(arguments: list[str], memory_mb: int) -> int:
    """Run pytest with the arguments in the machine, show what it prints, and return its exit status."""
    for program in ("qemu-system-x86_64", "busybox", "cpio"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is missing: apt-get install qemu-system-x86 busybox-static cpio")
    with tempfile.TemporaryDirectory(prefix="bf-machine-") as folder:
        image, modules = kernel_in(Path(folder))
        command = [
            "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", str(memory_mb), "-nographic", "-no-reboot",
            "-kernel", str(image), "-initrd", str(make_initrd(Path(folder), modules, arguments)),
            "-append", "console=ttyS0 quiet panic=-1", "-net", "none",
            "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
            "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
        ]  # fmt: skip
        said = ""
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as machine:
            assert machine.stdout is not None
            while character := machine.stdout.read(1):  # dots come without an end of line
                print(character, end="", flush=True)
                said += character
    status = RESULT.search(said)
    return 1 if status is None else int(status[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory_mb", type=int, default=4096, help="memory of the machine (default: %(default)s)")
    options, arguments = parser.parse_known_args()
    return run(arguments or list(CHECKS), options.memory_mb)


if __name__ == "__main__":
    sys.exit(main())
