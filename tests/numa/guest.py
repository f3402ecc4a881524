"""Boots a machine with two NUMA nodes under QEMU and runs mpillm in it: `python tests/numa/guest.py`.

The guest's disk has this Python, the packages that mpillm needs with their libraries, and this checkout, all under
the paths that they have here; inside.py is its first process. Needs qemu-system-x86_64, mke2fs, and Debian's cloud
kernel: a vmlinuz given with --kernel, or downloaded with apt-get. Software emulation: no KVM needed.
"""

from __future__ import annotations

import argparse
import configparser
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
INSIDE = HERE / "inside.py"
CPUS, MEMORY = 4, 3072          # of the guest; MiB
# One node for each half of the CPUs and of the memory, 21 and 10 being the distances of real machines
NUMA = ("-object", f"memory-backend-ram,id=m0,size={MEMORY // 2}M", "-object",
        f"memory-backend-ram,id=m1,size={MEMORY // 2}M", "-numa", "node,nodeid=0,cpus=0-1,memdev=m0",
        "-numa", "node,nodeid=1,cpus=2-3,memdev=m1", "-numa", "dist,src=0,dst=1,val=21")


def missing() -> list[str]:
    """Programs that are needed and not there."""
    return [name for name in ("qemu-system-x86_64", "mke2fs", "ldd") if shutil.which(name) is None]


def kernel(folder: Path) -> Path:
    """Debian's cloud kernel, downloaded into ``folder``: NVMe and ext4 are built into it."""
    found = subprocess.check_output(["apt-cache", "depends", "linux-image-cloud-amd64"], text=True)
    match = re.search(r"linux-image-\d\S+", found)
    assert match, "apt-cache names no linux-image-cloud-amd64: apt-get update, or give --kernel"
    subprocess.run(["apt-get", "download", "-qq", match[0]], cwd=folder, check=True, stderr=subprocess.DEVNULL)
    subprocess.run(["dpkg", "-x", *map(str, folder.glob("*.deb")), str(folder)], check=True)
    return next((folder / "boot").glob("vmlinuz-*"))


def packages() -> list[metadata.Distribution]:
    """What setup.cfg asks for, mpich, and all that these need in turn."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    waiting = [*setup["options"]["install_requires"].split("\n"), "mpich"]
    found: dict[str, metadata.Distribution] = {}
    while waiting:
        wanted = waiting.pop()
        match = re.match(r"[A-Za-z0-9._-]+", wanted)
        if not match or "extra ==" in wanted or match[0].lower() in found:
            continue
        try:
            found[match[0].lower()] = metadata.distribution(match[0])
        except metadata.PackageNotFoundError:       # for another Python or system
            continue
        waiting += found[match[0].lower()].requires or []
    return list(found.values())


def copy(path: Path, root: Path) -> None:
    """``path``, its links followed, to the same place below ``root``."""
    target = root / path.relative_to("/")
    if target.exists() or not path.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def fill(root: Path) -> None:
    """The guest's files."""
    python = Path(sys.executable)
    for path in (python, python.resolve(), python.parents[1] / "pyvenv.cfg"):
        copy(path, root)
    stdlib = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(stdlib, root / stdlib.relative_to("/"), dirs_exist_ok=True, ignore=shutil.ignore_patterns(
        "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "config-*", "*.a"))
    for package in packages():
        for file in package.files or ():
            copy(Path(str(package.locate_file(file))).absolute(), root)
    for folder in ("mpillm", "tests/numa"):
        shutil.copytree(REPOSITORY / folder, root / (REPOSITORY / folder).relative_to("/"), dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("__pycache__"))
    # The shared libraries of all of it, and the loader
    binaries = [str(p) for p in root.rglob("*") if p.is_file() and (".so" in p.name or p.stat().st_mode & 0o111)]
    said = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    for name in sorted(set(re.findall(r"(/\S+) \(0x", said))):
        copy(Path(name), root)
    for name in ("proc", "sys", "dev", "tmp", "etc"):
        (root / name).mkdir(exist_ok=True)
    (root / "etc/hosts").write_text("127.0.0.1 localhost guest\n")
    (root / "etc/passwd").write_text("root:x:0:0:root:/tmp:/bin/sh\n")
    shell = Path(shutil.which("dash") or "/bin/sh").resolve()
    copy(shell, root)
    (root / "bin").mkdir(exist_ok=True)
    shutil.copy(shell, root / "bin/sh")
    (root / "init").write_text(f"#!{python} -u\n" + INSIDE.read_text())
    (root / "init").chmod(0o755)


def boot(vmlinuz: Path, image: Path, seconds: float, said: Callable[[str], object]) -> str:
    """What the guest prints between its two marks; each line goes to ``said`` at once. AssertionError if late."""
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(CPUS), "-m", f"{MEMORY}M",
               *NUMA, "-kernel", str(vmlinuz), "-append",
               f"root=/dev/nvme0n1 rw console=ttyS0 quiet panic=-1 init=/init "
               f"mpillm.python={sys.executable} mpillm.repository={REPOSITORY}",
               "-drive", f"file={image},if=none,format=raw,id=disk", "-device", "nvme,drive=disk,serial=1",
               "-nographic", "-no-reboot", "-net", "none"]
    lines, machine = [], subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                                          stderr=subprocess.STDOUT, errors="replace")
    clock = threading.Timer(seconds, machine.kill)
    clock.start()
    shown = False
    try:
        assert machine.stdout is not None, "its output is a pipe"
        for line in machine.stdout:
            lines.append(line.replace("\r", ""))
            if lines[-1] == "== end\n":
                shown = False
            if shown:
                said(lines[-1])
            elif lines[-1].endswith("== begin\n"):
                shown = True
    finally:
        clock.cancel()
        machine.kill()
        machine.wait()
    match = re.search(r"== begin\n(.*)== end\n", "".join(lines), re.DOTALL)
    assert match, f"the guest did not come to its end in {seconds:g} s:\n{''.join(lines)[-4000:]}"
    return match[1]


def run(vmlinuz: Path | None = None, seconds: float = 1800, said: Callable[[str], object] = str) -> str:
    """Make the guest, boot it, return what it printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel").mkdir()
        vmlinuz = vmlinuz or kernel(folder / "kernel")
        root, image = folder / "root", folder / "disk"
        root.mkdir()
        fill(root)
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(image), "3G"], check=True)
        return boot(vmlinuz, image, seconds, said)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run mpillm in a machine with two NUMA nodes (QEMU).")
    parser.add_argument("--kernel", type=Path, metavar="VMLINUZ", help="default: Debian's cloud kernel, by apt-get")
    given = parser.parse_args()
    lacking = missing()
    if lacking:
        sys.exit(f"missing: {', '.join(lacking)}: apt-get install qemu-system-x86 e2fsprogs")
    run(given.kernel, said=lambda line: print(line, end="", flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
