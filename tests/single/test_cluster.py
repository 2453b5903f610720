"""benchmarks/cluster.py: links are as slow as asked, bytes are counted, nothing is left behind.

Oracles: the byte counts that plain sockets report, the kernel's own lists of namespaces and queues, and the clock where
it can't be late: nothing crosses a link faster than asked, however busy the machine is.
Hosts need root; without it the one thing to test is that the error says so.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "cluster.py"
N_SENT = 4_000_000

# Host 1 sends N_SENT bytes to host 0, which prints how long a byte's round trip and the whole transfer took.
TRANSFER = f"""
import os, socket, time
if os.environ["HOST_INDEX"] == "0":
    peer, _ = socket.create_server(("0.0.0.0", 5201)).accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    start = time.monotonic()
    peer.sendall(b"?")
    peer.recv(1)
    round_trip = time.monotonic() - start
    start, n_received = time.monotonic(), 0
    peer.sendall(b"!")
    while chunk := peer.recv(1 << 20):
        n_received += len(chunk)
    assert n_received == {N_SENT}
    print(round_trip, time.monotonic() - start)
else:
    for attempt in range(200):
        try:
            peer = socket.create_connection(("10.77.0.1", 5201))
            break
        except OSError:
            time.sleep(0.05)
    peer.sendall(peer.recv(1))
    peer.recv(1)
    peer.sendall(bytes({N_SENT}))
    peer.close()
"""


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cluster_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cluster = _load()
can_build = not cluster.missing()
requires_hosts = pytest.mark.skipif(not can_build, reason="hosts need: " + ", ".join(cluster.missing()))


def _namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"aps{pid}x")]


def _pids_in(namespace: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return listed.stdout.split()


def _rate_of(namespace: str) -> float:
    """Bits per second that the kernel lets a host send."""
    listed = subprocess.run(
        ["tc", "-j", "-n", namespace, "qdisc", "show", "dev", "eth0"], capture_output=True, text=True, check=True
    )
    return 8.0 * json.loads(listed.stdout)[0]["options"]["rate"]


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@requires_hosts
@pytest.mark.parametrize(("rate", "delay_ms"), [("20mbit", 0.0), ("100mbit", 0.0), ("100mbit", 20.0)])
def test_cluster_honours_rate_and_delay(rate: str, delay_ms: float) -> None:
    with cluster.Cluster(2, rate, delay_ms) as hosts:
        before = hosts.bytes()
        done = hosts.run([sys.executable, "-c", TRANSFER], timeout=60)
        sent = [after - start for start, after in zip(before, hosts.bytes(), strict=True)]
        assert [_rate_of(host) for host in hosts.hosts] == [cluster.rate_in_bits(rate)] * 2
    assert [one.returncode for one in done] == [0, 0], done
    round_trip, seconds = map(float, done[0].stdout.split())
    # Never faster than the wire, but for the buckets' burst.
    assert seconds > 0.9 * N_SENT * 8 / cluster.rate_in_bits(rate)
    assert round_trip >= 2e-3 * delay_ms
    assert N_SENT < sent[1] < 1.3 * N_SENT  # headers, and what the queue dropped and TCP sent again
    assert sent[0] < 0.1 * N_SENT


@requires_hosts
def test_cluster_mpirun_gives_each_rank_its_own_host() -> None:
    with cluster.Cluster(3, "1gbit") as hosts:
        done = hosts.mpirun(
            ["sh", "-c", "echo $OMPI_COMM_WORLD_RANK $(cat /proc/sys/kernel/hostname) $GREETING"],
            env={"GREETING": "hello"},
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"{k} {host} hello" for k, host in enumerate(hosts.hosts)]


@requires_hosts
def test_cluster_timeout_kills_everything_on_the_hosts() -> None:
    with cluster.Cluster(2, None) as hosts:
        with pytest.raises(cluster.ClusterTimeout, match="killed after 2 s"):
            hosts.mpirun(["sleep", "1234"], timeout=2)
        assert [_pids_in(host) for host in hosts.hosts] == [[], []]


@requires_hosts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("delay_ms", ["0", "1"])
def test_cluster_signal_leaves_nothing_behind(number: signal.Signals, delay_ms: str) -> None:
    driver = subprocess.Popen(
        [
            sys.executable,
            str(SCRIPT),
            "--hosts",
            "2",
            "--rate",
            "1gbit",
            "--delay-ms",
            delay_ms,
            "--",
            "sleep",
            "1235",
        ],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # whatever started us may ignore it, as nohup does
    )
    try:
        assert _wait_for(lambda: _runs("sleep 1235", driver.pid) == 2, 60)
        driver.send_signal(number)
        driver.wait(timeout=60)
    finally:
        driver.kill()
        driver.wait()
    assert _namespaces_of(driver.pid) == []
    assert list(Path("/etc/netns").glob(f"aps{driver.pid}x*")) == []
    assert list(cluster.STATE.glob(f"aps{driver.pid}x*")) == []


def _runs(command: str, driver: int) -> int:
    """How many processes in the driver's namespaces run a command."""
    pids = [pid for name in _namespaces_of(driver) for pid in _pids_in(name)]
    n_running = 0
    for pid in pids:
        path = Path(f"/proc/{pid}/cmdline")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # processes of other tests come and go
            n_running += path.read_bytes().replace(b"\0", b" ").strip() == command.encode()
    return n_running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cluster_signal_ends_local_ranks(number: signal.Signals, tmp_path: Path) -> None:
    command = ["sh", "-c", f"echo $$ >{tmp_path}/$OMPI_COMM_WORLD_RANK.pid; exec sleep 1237"]
    driver = subprocess.Popen([sys.executable, str(SCRIPT), "--rate", "shm", "--", *command])
    try:
        assert _wait_for(lambda: sum(path.stat().st_size > 0 for path in tmp_path.glob("*.pid")) == 2, 60)
        driver.send_signal(number)
        driver.wait(timeout=60)
    finally:
        driver.kill()
        driver.wait()
    processes = [Path("/proc") / path.read_text().strip() for path in tmp_path.glob("*.pid")]
    assert _wait_for(lambda: not any(process.exists() for process in processes), 60)


@requires_hosts
def test_cluster_sweep_removes_what_a_killed_run_left_and_spares_the_living() -> None:
    driver = subprocess.Popen([sys.executable, str(SCRIPT), "--hosts", "2", "--", "sleep", "1236"])
    try:
        assert _wait_for(lambda: _runs("sleep 1236", driver.pid) == 2, 60)
        cluster.sweep()
        assert len(_namespaces_of(driver.pid)) == 3  # two hosts and the switch
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert len(_namespaces_of(driver.pid)) == 3
    cluster.sweep()
    assert _namespaces_of(driver.pid) == []


def test_cluster_without_root_says_what_is_missing_and_offers_loopback() -> None:
    def drop_root() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)

    # The scripts are copied, and the system's Python runs them: here, only root may be able to read either.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        package = Path(folder, "horovod_aps", "bench")
        package.mkdir(parents=True)
        for name in ("cluster.py", "netns.py"):
            shutil.copy(ROOT / "horovod_aps" / "bench" / name, package)
        done = subprocess.run(
            ["python3", "-m", "horovod_aps.bench.cluster", "--hosts", "2", "--", "true"],
            preexec_fn=drop_root,
            capture_output=True,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            check=False,
        )
    assert done.returncode == 2
    assert "needs root privileges" in done.stderr and "--rate shm" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        {"n_hosts": 0},
        {"n_hosts": 2, "rate": "fast"},
        {"n_hosts": 2, "rate": "0gbit"},
        {"n_hosts": 2, "delay_ms": -1},
        {"n_hosts": 2, "rate": "shm", "delay_ms": 1},
    ],
)
def test_cluster_refuses_bad_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="^Cluster: "):
        cluster.Cluster(**arguments)
