"""A SLURM of four virtual nodes on this machine: its own munge, slurmctld and slurmd, in a folder of its own."""

from __future__ import annotations

import getpass
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NODES = 4
DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sinfo", "setpriv")
PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))

# AuthInfo: a requeued job waits until the credentials of its first start expire, 2 minutes by default
SETTINGS = """\
ClusterName=probe
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
TmpFS={folder}/tmpfs/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
JobRequeue=1
KillWait=5
SlurmdParameters=config_overrides
"""
NODE = "NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 State=UNKNOWN\n"
PARTITION = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"


def missing() -> list[str]:
    """Programs that a cluster needs and this machine does not have."""
    return [name for name in DAEMONS + COMMANDS if shutil.which(name, path=PATH) is None]


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens at, below those that the system gives to outgoing connections."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    assert len(found) == count, f"only {len(found)} free ports"
    return found


class Cluster:
    """A running cluster; its daemons are children of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, []
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        for name in ("state", "log", *(f"{kind}/n{i + 1}" for kind in ("spool", "tmpfs") for i in range(NODES))):
            (folder / name).mkdir(parents=True)
        host, ports = socket.gethostname().split(".")[0], free_ports(NODES + 1)
        (folder / "slurm.conf").write_text(
            SETTINGS.format(host=host, user=getpass.getuser(), folder=folder, ports=ports)
            + "".join(NODE.format(i=i + 1, host=host, port=ports[i + 1]) for i in range(NODES)) + PARTITION)

    def start(self) -> None:
        """Start the daemons and wait until all nodes are idle."""
        key, sock = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}",
                     f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/log/munged.log",
                     f"--seed-file={self.folder}/munge.seed")
        wait_until(sock.exists, 10, self.logs)
        self._daemon("slurmctld", "-D", "-i")
        for i in range(NODES):
            self._daemon("slurmd", "-D", "-N", f"n{i + 1}")
        wait_until(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == str(NODES), 30,
                   self.logs)

    def _daemon(self, *command: str) -> None:
        with open(self.folder / "log" / f"{command[0]}.{len(self.daemons)}.out", "wb") as out:
            # setpriv: they end with this process, however it ends
            self.daemons.append(subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=self.environment, start_new_session=True))

    def call(self, *command: str, check: bool = True, **variables: str) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(command, env=self.environment | variables, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, **variables: str) -> int:
        """sbatch; the job's number."""
        return int(self.call("sbatch", "--parsable", *map(str, arguments), **variables).split(";")[0])

    def job(self, job: int | str) -> dict[str, str]:
        """What scontrol knows of a job (of an array's task as "12_3")."""
        text = self.call("scontrol", "show", "job", "-o", str(job))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, job: int | str, seconds: float, explain: Callable[[], str]) -> dict[str, str]:
        """The job when it has ended for good; AssertionError with ``explain()`` if that takes too long."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_until(lambda: self.job(job)["JobState"] in ended, seconds, explain)
        return self.job(job)

    def logs(self) -> str:
        """The end of each daemon's log."""
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-600:]}"
                         for path in sorted((self.folder / "log").iterdir()))

    def stop(self) -> None:
        """End all jobs and daemons."""
        with suppress(AssertionError, OSError, subprocess.TimeoutExpired):
            self.call("scancel", "--user", getpass.getuser(), check=False)
            wait_until(lambda: not self.call("squeue", "-h", check=False).strip(), 20, self.logs)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        for process in self.processes():
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def processes(self) -> list[int]:
        """What jobs of this cluster left running: known by its configuration in their environment."""
        mark, found = f"SLURM_CONF={self.folder}/slurm.conf".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                    found.append(int(folder.name))
        return found


def wait_until(true: Callable[[], bool], seconds: float, explain: Callable[[], str]) -> None:
    """Ask ``true`` until it is; AssertionError with ``explain()`` when the time is over."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s\n{explain()}"
        time.sleep(0.2)


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster for the time of a ``with``."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
