"""Hosts with slow links on one machine: network namespaces, veth pairs, a switch and token buckets.

    with Cluster(2, rate="1gbit", delay_ms=0) as cluster:
        done = cluster.mpirun([sys.executable, "worker.py"])       # one rank per host, Open MPI over TCP
        done = cluster.horovodrun([sys.executable, "worker.py"])   # the same with Gloo
        print(done.returncode, done.stdout, cluster.bytes())       # bytes sent by each host so far

Every host is a network namespace with its own host name, its own /etc/hosts and one interface `eth0`,
limited in both directions. The switch sits in a namespace of its own, so nothing appears among the
machine's interfaces. `rate=None` leaves the links unlimited, `rate="shm"` makes no namespaces at all: plain
local ranks over shared memory (MPI) or loopback (Gloo), which needs no privileges.

From the shell:  python -m horovod_aps.bench.cluster --hosts 2 --rate 1gbit -- python script.py

Everything is taken down on exit, on an exception, and on SIGINT, SIGTERM or SIGHUP; what a SIGKILL leaves
behind is removed by the next Cluster, or by `python -m horovod_aps.bench.cluster --sweep`.
"""

import argparse
import atexit
import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from horovod_aps.bench.netns import (
    ENTER_SCRIPT,
    ETC_NETNS,
    SIGNALS,
    SSH_SCRIPT,
    STATE,
    ClusterError,
    ClusterTimeout,
    interface_bytes,
    kill_namespace,
    kill_tree,
    missing,
    mutex,
    remove,
    run_tool,
    signals_blocked,
    sweep,
)

__all__ = ["Cluster", "ClusterError", "ClusterTimeout", "interface_bytes", "missing", "rate_in_bits", "sweep"]

SUBNET = "10.77.0"
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_serial = itertools.count()


def rate_in_bits(rate: str) -> float:
    """Bits per second of a rate as `tc` writes it: "100mbit", "1gbit", "2.5gbit"."""
    match = re.fullmatch(r"([0-9.]+)([kmg]?)bit", rate)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f'Cluster: rate must look like "1gbit" or be "shm" or None, got {rate!r}')
    return float(match[1]) * _UNITS[match[2]]


class Cluster:
    """Hosts on one machine with links of a chosen rate and latency; use it as a context manager.

    Attributes: `hosts` (host names, which are also the namespaces' names; all "localhost" for "shm"),
    `is_local`, `rate_bits` (None if unlimited), `n_hosts`. `delay_ms` is the time from one host to another,
    half a round trip. `pin` gives every host its own share of the cores instead of letting all hosts use
    all cores.
    """

    def __init__(self, n_hosts: int, rate: str | None = "1gbit", delay_ms: float = 0.0, pin: bool = False) -> None:
        if n_hosts < 1 or n_hosts > 200:
            raise ValueError(f"Cluster: n_hosts must be in 1..200, got {n_hosts}")
        if delay_ms < 0:
            raise ValueError(f"Cluster: delay_ms must not be negative, got {delay_ms}")
        self.n_hosts, self.rate, self.delay_ms, self.pin = n_hosts, rate, delay_ms, pin
        self.is_local = rate == "shm"
        if self.is_local and delay_ms:
            raise ValueError('Cluster: rate="shm" has no link that delay_ms could slow down')
        self.rate_bits = None if rate is None or self.is_local else rate_in_bits(rate)
        self._prefix = f"aps{os.getpid()}x{next(_serial)}"
        self.hosts = ["localhost"] * n_hosts if self.is_local else [f"{self._prefix}h{k}" for k in range(n_hosts)]
        self._switch = f"{self._prefix}switch"
        self._state = STATE / self._prefix
        self._running: set[subprocess.Popen[str]] = set()
        self._lock: int | None = None
        self._old_handlers: dict[signal.Signals, object] = {}
        self._is_up = False

    def __enter__(self) -> "Cluster":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Build the hosts; `close` must follow, which the context manager sees to."""
        if not self.is_local and (lacks := missing()):
            raise ClusterError(
                f"Cluster: building hosts needs {' and '.join(lacks)}. "
                'Without them rate="shm" (--rate shm) runs the ranks on this machine.'
            )
        self._is_up = True
        atexit.register(self.close)
        self._catch_signals()
        try:
            if not self.is_local:
                sweep()
                self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill what still runs on the hosts and remove them; harmless when called again."""
        if not self._is_up:
            return
        with signals_blocked():
            self._is_up = False
            for process in list(self._running):
                kill_tree(process)
            if not self.is_local:
                remove(self._prefix)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
            atexit.unregister(self.close)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._old_handlers.clear()

    def bytes(self) -> list[int]:
        """Bytes that each host has sent since the cluster was built; empty for "shm", which has no wire.

        The kernel counts a large TCP segment once, headers included, so the frames' extra headers (3.6 % at
        an MTU of 1500) are in the time that the link takes, but not in this number.
        """
        if self.is_local:
            return []
        reports = [
            json.loads(run_tool("ip", "-j", "-s", "-n", host, "link", "show", "dev", "eth0")) for host in self.hosts
        ]
        return [int(report[0]["stats64"]["tx"]["bytes"]) for report in reports]

    def mpirun(
        self,
        argv: Sequence[str],
        np: int | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        extra_mca: Mapping[str, str | None] | None = None,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run argv on all hosts under Open MPI, one rank per host unless np says otherwise.

        `env` is exported to the ranks. A parameter that is None in `extra_mca` is left to Open MPI. With `capture` the
        result holds stdout and stderr, else both go to this process's own. Raises ClusterTimeout, with everything on
        the hosts killed, after `timeout` seconds.
        """
        n_ranks = self.n_hosts if np is None else np
        command = [
            "mpirun",
            "--allow-run-as-root",
            "--bind-to",
            "none",
            "--map-by",
            "slot",
            "-np",
            str(n_ranks),
        ]
        mca = {"pml": "ob1"}
        if self.is_local:
            command += ["--oversubscribe"]
            mca["btl"] = "vader,self"
        else:
            command += ["-H", self._host_list(n_ranks)]
            mca |= {
                "plm_rsh_agent": str(self._state / "ssh"),
                "btl": "tcp,self" if n_ranks <= self.n_hosts else "tcp,vader,self",
                "btl_tcp_if_include": f"{SUBNET}.0/24",
                "oob_tcp_if_include": f"{SUBNET}.0/24",
            }
        if 2 * n_ranks > (os.cpu_count() or 1):
            # A rank has two threads, its own and Horovod's, and each host believes that it has all cores to itself.
            # Without this the thread that waits in MPI keeps the others from the cores: all methods get slower.
            mca["mpi_yield_when_idle"] = "1"
        for key, value in (mca | dict(extra_mca or {})).items():
            if value is not None:
                command += ["--mca", key, value]
        for key in env or {}:
            command += ["-x", key]
        return self._launch([*command, *argv], env, timeout, capture)

    def horovodrun(
        self,
        argv: Sequence[str],
        np: int | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run argv on all hosts under `horovodrun --gloo`; as `mpirun` in everything else."""
        n_ranks = self.n_hosts if np is None else np
        # The launcher of the environment that this Python belongs to, whether or not that is activated.
        beside = Path(sys.executable).parent / "horovodrun"
        command = [str(beside) if beside.exists() else "horovodrun", "--gloo", "-np", str(n_ranks)]
        if self.is_local:
            command += ["-H", f"localhost:{n_ranks}"]
        else:
            command += ["-H", self._host_list(n_ranks), "--network-interfaces", "eth0"]
        return self._launch([*command, *argv], env, timeout, capture)

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        capture: bool = True,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run argv on every host at once, without a launcher; HOST_INDEX tells the copies apart."""
        results: dict[int, subprocess.CompletedProcess[str] | ClusterError] = {}

        def one(k: int) -> None:
            try:
                results[k] = self._launch(argv, {**(env or {}), "HOST_INDEX": str(k)}, timeout, capture, host=k)
            except ClusterError as error:
                results[k] = error

        threads = [threading.Thread(target=one, args=(k,)) for k in range(self.n_hosts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results.values():
            if isinstance(result, ClusterError):
                raise result
        return [result for _, result in sorted(results.items()) if isinstance(result, subprocess.CompletedProcess)]

    def address(self, host: int = 0) -> str:
        """The IPv4 address of a host."""
        return "127.0.0.1" if self.is_local else f"{SUBNET}.{host + 1}"

    def _host_list(self, n_ranks: int) -> str:
        slots = -(-n_ranks // self.n_hosts)
        return ",".join(f"{host}:{slots}" for host in self.hosts)

    def _launch(
        self, argv: Sequence[str], env: Mapping[str, str] | None, timeout: float, capture: bool, host: int = 0
    ) -> subprocess.CompletedProcess[str]:
        if not self._is_up:
            raise ClusterError("Cluster: not running; use it in a `with` statement")
        command = list(argv) if self.is_local else [str(self._state / "enter"), self.hosts[host], *argv]
        environment = {**os.environ, **(env or {})}
        if not self.is_local:
            environment["PATH"] = f"{self._state}:{environment.get('PATH', '')}"
        pipe = subprocess.PIPE if capture else None
        # A session of its own keeps the terminal's Ctrl-C for this process, which then kills what it started.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
        self._running.add(process)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._kill_all(process)
            out, err = process.communicate()
            raise ClusterTimeout(
                f"Cluster: killed after {timeout:.0f} s: {' '.join(argv)}", (out or "") + (err or "")
            ) from None
        except BaseException:
            # A signal's exception: nothing may outlive this process, and "shm" has no namespace to search.
            with signals_blocked():
                self._kill_all(process)
            raise
        finally:
            self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def _kill_all(self, process: subprocess.Popen[str]) -> None:
        kill_tree(process)
        for host in [] if self.is_local else self.hosts:
            kill_namespace(host)

    def _build(self) -> None:
        with mutex():
            self._state.mkdir(parents=True)
            self._lock = os.open(self._state / "lock", os.O_CREAT | os.O_RDWR)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        for name, text in (("enter", ENTER_SCRIPT), ("ssh", SSH_SCRIPT)):
            (self._state / name).write_text(text)
            (self._state / name).chmod(0o755)
        table = "127.0.0.1 localhost\n" + "".join(f"{self.address(k)} {host}\n" for k, host in enumerate(self.hosts))
        run_tool("ip", "netns", "add", self._switch)
        for k, host in enumerate(self.hosts):
            (self._state / f"{host}.cores").write_text(self._cores(k))
            (ETC_NETNS / host).mkdir(parents=True)
            (ETC_NETNS / host / "hosts").write_text(table)
            # The machine's name servers are out of reach; asking them would cost seconds at every connection.
            (ETC_NETNS / host / "resolv.conf").write_text("nameserver 127.0.0.1\n")
            run_tool("ip", "netns", "add", host)
            run_tool(
                "ip",
                "link",
                "add",
                "eth0",
                "netns",
                host,
                "type",
                "veth",
                "peer",
                "name",
                f"port{k}",
                "netns",
                self._switch,
            )
            # No IPv6: its chatter would be counted. Cubic where there is a choice: the default may be one
            # that paces by its own estimate of the link, which adds to what is being measured.
            run_tool(
                "ip",
                "netns",
                "exec",
                host,
                "sh",
                "-c",
                "echo 1 2>&- >/proc/sys/net/ipv6/conf/all/disable_ipv6; "
                "echo cubic 2>&- >/proc/sys/net/ipv4/tcp_congestion_control; true",
            )
            run_tool("ip", "-n", host, "address", "add", f"{self.address(k)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run_tool("ip", "-n", host, "link", "set", device, "up")
            run_tool("ip", "-n", self._switch, "link", "set", f"port{k}", "up")
            if self.rate_bits is not None:
                self._limit(host, "eth0")
                self._limit(self._switch, f"port{k}")
        self._connect_ports()

    def _cores(self, k: int) -> str:
        cores = sorted(os.sched_getaffinity(0))
        if self.pin:
            share = max(1, len(cores) // self.n_hosts)
            first = (k * share) % len(cores)
            cores = cores[first : first + share]
        return ",".join(map(str, cores))

    def _limit(self, namespace: str, device: str) -> None:
        """Token bucket on what leaves a device; its burst holds at least one 64 kB segment."""
        assert self.rate_bits is not None
        burst = max(int(self.rate_bits / 8 * 1e-3), 80_000)
        queue = max(int(self.rate_bits / 8 * 0.05), 1_000_000)
        run_tool(
            "tc",
            "-n",
            namespace,
            "qdisc",
            "add",
            "dev",
            device,
            "root",
            "tbf",
            "rate",
            f"{self.rate_bits:.0f}bit",
            "burst",
            str(burst),
            "limit",
            str(queue),
        )

    def _connect_ports(self) -> None:
        ports = [f"port{k}" for k in range(self.n_hosts)]
        if self.delay_ms == 0:
            run_tool(
                "ip",
                "-n",
                self._switch,
                "link",
                "add",
                "bridge0",
                "type",
                "bridge",
                "stp_state",
                "0",
                "forward_delay",
                "0",
                "mcast_snooping",
                "0",
            )
            for port in ports:
                run_tool("ip", "-n", self._switch, "link", "set", port, "master", "bridge0")
            run_tool("ip", "-n", self._switch, "link", "set", "bridge0", "up")
            return
        script = Path(__file__).with_name("delayline.py")
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self._switch,
                sys.executable,
                str(script),
                "--delay-ms",
                str(self.delay_ms),
                *ports,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._running.add(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise ClusterError(f"Cluster: {script.name} did not start, exit code {process.wait()}")

    def _catch_signals(self) -> None:
        """Turn signals that would end the process at once into exceptions, so that `close` runs."""
        if threading.current_thread() is not threading.main_thread():
            return

        def stop(number: int, frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        for number in SIGNALS:
            # SIGINT counts as unhandled also when a shell started us with it ignored, as in `command &`.
            handler = signal.getsignal(number)
            if handler == signal.SIG_DFL or (number == signal.SIGINT and handler == signal.SIG_IGN):
                self._old_handlers[number] = signal.signal(number, stop)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command on hosts with slow links.", allow_abbrev=False)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (2)")
    parser.add_argument("--np", type=int, help="number of ranks (one per host)")
    parser.add_argument("--rate", default="1gbit", help='of each link, such as 100mbit, or "shm", or "none" (1gbit)')
    parser.add_argument("--delay-ms", type=float, default=0.0, help="from host to host, half a round trip (0)")
    parser.add_argument("--pin", action="store_true", help="give each host its own cores")
    parser.add_argument("--launcher", choices=("mpi", "gloo", "plain"), default="mpi")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds (3600)")
    parser.add_argument("--sweep", action="store_true", help="only remove what dead runs have left behind")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command")
    arguments = parser.parse_args()
    if arguments.sweep:
        print("removed:", " ".join(sweep()) or "nothing")
        return 0
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("no command given")
    rate = None if arguments.rate == "none" else arguments.rate
    try:
        with Cluster(arguments.hosts, rate, arguments.delay_ms, arguments.pin) as cluster:
            if arguments.launcher == "mpi":
                return cluster.mpirun(command, arguments.np, timeout=arguments.timeout, capture=False).returncode
            if arguments.launcher == "gloo":
                return cluster.horovodrun(command, arguments.np, timeout=arguments.timeout, capture=False).returncode
            return max(done.returncode for done in cluster.run(command, timeout=arguments.timeout, capture=False))
    except (ClusterError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
