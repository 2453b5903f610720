"""Namespaces, processes and locks below cluster.py: how hosts are entered, found again and removed.

A living cluster holds a lock on its folder under STATE; a folder whose lock is free belongs to a process that
was killed, and `sweep` removes what it left.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

STATE = Path("/run/horovod_aps_clusters")
NETNS = Path("/run/netns")
ETC_NETNS = Path("/etc/netns")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Enter a host: its namespace (with its /etc/hosts), its cores, its host name.
ENTER_SCRIPT = """#!/bin/sh
host=$1; shift
cores=$(cat "$(dirname "$0")/$host.cores") || exit 255
exec ip netns exec "$host" taskset -c "$cores" unshare -u \\
    sh -c 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"' "$host" "$@"
"""
# What mpirun's plm_rsh_agent and horovodrun call as `ssh [options] host [options] command...`.
SSH_SCRIPT = """#!/bin/sh
host=
while [ $# -gt 0 ]; do
    case $1 in
        -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;;
        -*) shift ;;
        *) [ -z "$host" ] || break; host=${1#*@}; shift ;;
    esac
done
exec "$(dirname "$0")/enter" "$host" sh -c "$*"
"""


class ClusterError(RuntimeError):
    """The hosts cannot be built here, or a command that builds them failed."""


class ClusterTimeout(ClusterError):
    """A launched command took too long and was killed; `output` holds what it had printed."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


def missing() -> list[str]:
    """What this machine lacks for building hosts; empty if nothing."""
    lacks = [] if os.geteuid() == 0 else ["root privileges"]
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "taskset": "util-linux"}
    lacks += [
        f"the command `{name}` (Debian package {package})"
        for name, package in packages.items()
        if shutil.which(name) is None
    ]
    return lacks


def interface_bytes(interface: str = "eth0") -> int | None:
    """Bytes sent so far through an interface of the caller's own host; None if it has no such interface."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            return int(counters.split()[8])
    return None


def sweep() -> list[str]:
    """Remove the hosts of clusters whose process has died; returns their name prefixes."""
    removed = []
    with mutex():
        for lock_path in sorted(STATE.glob("*/lock")):
            with open(lock_path) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # its owner lives
                remove(lock_path.parent.name)
                removed.append(lock_path.parent.name)
    return removed


@contextlib.contextmanager
def mutex() -> Iterator[None]:
    """Held while a cluster's lock is being made or tested, so that sweep never meets a half-made one."""
    STATE.mkdir(parents=True, exist_ok=True)
    with open(STATE / "mutex", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    old = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def run_tool(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"Cluster: `{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def remove(prefix: str) -> None:
    """Take down all namespaces with a name prefix, and their files; ignores what is already gone."""
    for path in sorted(NETNS.glob(f"{prefix}h*")) + sorted(NETNS.glob(f"{prefix}switch")):
        kill_namespace(path.name)
        subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)
    for path in ETC_NETNS.glob(f"{prefix}h*"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(STATE / prefix, ignore_errors=True)


def kill_namespace(name: str) -> None:
    """Kill every process in a namespace, again until none is left: they may be forking."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        listed = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
        if not (pids := listed.stdout.split()):
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def kill_tree(process: subprocess.Popen[str]) -> None:
    """End a launcher and all it started: first politely, since launchers then clean up after themselves."""
    if process.poll() is not None:
        return
    below = _descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    for pid in [process.pid, *below]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command's name may hold brackets; the parent is the second field after the last one.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found
