"""The transport over TCP connections of our own, used where MPI cannot be called directly, as under Gloo.

Horovod's own operations would do, but Horovod numbers the unnamed ones: any that we start at a moment that differs
between ranks would give a user's unnamed operation different names. Every process has one listener. Its address and a
secret travel in the first message that all ranks exchange through Horovod (`words`), so that only ranks of the job can
connect. There is one connection per pair of ranks and transport; what is sent on it are frames: length, tag, bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_aps import config
from horovod_aps.errors import LostPeer
from horovod_aps.transports.base import Bytes
from horovod_aps.transports.farewell import FAREWELL, Farewells

WORDS_PER_RANK = 3  # of int32: the address, the port and a part of the secret, the rest of the secret
FRAME = struct.Struct("<QI")  # length, tag
HELLO = struct.Struct("<6s16sI")  # the listener's secret, the transport's name, the caller's rank
TAG_CONTROL, TAG_DATA = 0, 1
CONNECT_SECONDS = 60.0
# A host that has died without a word is noticed within 25 s: asked after 10 s of silence, three times, or as long with
# bytes under way that it does not confirm.
KEEP_ALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 25_000),
)
MAX_PUMP = 8 << 20  # bytes of one connection in one go
MAX_CONTROL = 1 << 28  # bytes of a control message, more than any that we send
_REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH}
TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)
RTT_AT = 68  # bytes into Linux's tcp_info
SHORT_RTT = 2000  # microseconds
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
OUTSIDE = "192.0.2.1"  # nobody's address: the way to it is the way out
MAX_HELLOS = 4096  # connections that may wait for their hello or their transport

_lock = threading.RLock()  # of the listener
farewells = Farewells()
atexit.register(farewells.take_leave)  # what was sent last must arrive before the connection is torn down


def own_address() -> str:
    """The IPv4 address at which other hosts reach this one: of the interface given, else of the way to them."""
    interfaces = config.network_interfaces()
    if interfaces:
        return _address_of(interfaces)
    found = _address_towards(config.meeting_address() or OUTSIDE)
    # A host may know itself, and so the meeting, by a loopback address, at which no other host finds it.
    return _address_towards(OUTSIDE) if found.startswith("127.") and not config.is_on_one_host() else found


def _address_of(interfaces: Sequence[str]) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for interface in interfaces:
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
                return socket.inet_ntoa(reply[20:24])
    raise ValueError(
        f"the network interface must be one with an IPv4 address, got {','.join(interfaces)!r} "
        f"(HOROVOD_GLOO_IFACE, GLOO_SOCKET_IFNAME)"
    )


def _address_towards(server: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((server, 9))  # sends nothing, but picks the way
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _leave_bbr(connection: socket.socket) -> None:
    """On short ways, take another congestion control than BBR, which has ranks wait that look only now and then.

    25.6 MB both ways between two busy ranks of a host took 200 ms with it, and 60 with cubic.
    """
    if connection.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16).rstrip(b"\0") != b"bbr":
        return
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RTT_AT + 4)
    if struct.unpack_from("<I", info, RTT_AT)[0] > SHORT_RTT:
        return
    for name in (b"cubic", b"reno"):  # the system may not let us have the first
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, name)
            return


class Listener:
    """Where other ranks call; one per process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((own_address(), 0))
        self._socket.listen(512)
        self._socket.setblocking(False)
        self._secret = os.urandom(6)
        self._strangers: list[tuple[socket.socket, bytearray]] = []
        self._arrived: dict[tuple[bytes, int], socket.socket] = {}

    def words(self, rank: int, size: int) -> np.ndarray:
        """What to sum over all ranks of a process set, so that each learns where the others listen."""
        words = np.zeros((size, WORDS_PER_RANK), np.int32)
        host, port = self._socket.getsockname()
        raw = socket.inet_aton(host) + struct.pack("<H", port) + self._secret
        words[rank] = np.frombuffer(raw, np.int32)
        return words.reshape(-1)

    def take(self, name: bytes, rank: int) -> socket.socket | None:
        """The connection by which a rank has called a transport, if it has."""
        with _lock:
            self._accept()
            return self._arrived.pop((name, rank), None)

    def _accept(self) -> None:
        while len(self._strangers) + len(self._arrived) < MAX_HELLOS:
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                break
            connection.setblocking(False)
            self._strangers.append((connection, bytearray()))
        waiting = []
        for connection, hello in self._strangers:
            try:
                part = connection.recv(HELLO.size - len(hello))
                hello += part
            except (BlockingIOError, InterruptedError):
                waiting.append((connection, hello))
                continue
            except OSError:
                part = b""
            if len(hello) == HELLO.size and hello[:6] == self._secret:
                _, name, rank = HELLO.unpack(hello)
                self._arrived[name, rank] = connection
            elif part and len(hello) < HELLO.size:
                waiting.append((connection, hello))
            else:  # not of this job
                connection.close()
        self._strangers = waiting


_listener: Listener | None = None


def listener() -> Listener:
    """The listener of this process, made when it is first needed; a forked child makes its own."""
    global _listener
    with _lock:
        if _listener is None or _listener.pid != os.getpid():
            _listener = Listener()
        return _listener


class _Peer:
    """One connection: frames to send, and the one that is being received."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        _leave_bbr(connection)
        self.outbox: deque[tuple[memoryview, _SocketRequest | None]] = deque()
        self.control: deque[bytes] = deque()
        self.wanted: dict[int, deque[tuple[Bytes, _SocketRequest]]] = {}  # by tag
        self.early: dict[int, deque[bytearray]] = {}  # came before anyone wanted it
        self.closed = self.left = False
        self.n_frames = 0  # that have come or gone
        self._front = bytearray(FRAME.size)
        self._view = memoryview(self._front)
        self._tag = -1  # of the frame whose bytes are coming
        self._request: _SocketRequest | None = None
        self._body: Any = None

    def send(self, tag: int, content: Any, request: _SocketRequest | None = None) -> None:
        body = memoryview(content).cast("B")
        self.outbox.append((memoryview(FRAME.pack(len(body), tag)), None))
        self.outbox.append((body, request))

    def want(self, tag: int, array: Bytes, request: _SocketRequest) -> None:
        """Have the next frame with this tag put into `array`."""
        early = self.early.get(tag)
        if early:
            np.copyto(array, np.frombuffer(early.popleft(), np.uint8))
            if not early:
                del self.early[tag]
            request.n_open -= 1
        else:
            self.wanted.setdefault(tag, deque()).append((array, request))

    def pump(self) -> None:
        """Send and receive what the kernel takes and has."""
        budget, moved = MAX_PUMP, True
        while budget > 0 and moved and not self.closed:
            sent, received = self._send_some(), self._receive_some()
            moved = sent + received > 0
            budget -= sent + received

    def _send_some(self) -> int:
        total = 0
        while self.outbox and total < MAX_PUMP:
            view, request = self.outbox[0]
            n = 0
            if len(view):
                try:
                    n = self.socket.send(view)
                except (BlockingIOError, InterruptedError):
                    return total
                except OSError:
                    self._end()
                    return total
            total += n
            if n < len(view):
                self.outbox[0] = (view[n:], request)
                return total
            self.outbox.popleft()
            if request is not None:
                request.n_open -= 1
                self.n_frames += 1
        return total

    def _receive_some(self) -> int:
        try:
            n = self.socket.recv_into(self._view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            n = 0
        if n == 0:
            self._end()
            return 0
        self._view = self._view[n:]
        while len(self._view) == 0 and not self.closed:
            if self._tag < 0:
                self._begin_body()
            else:
                self._end_body()
        return n

    def _begin_body(self) -> None:
        length, self._tag = FRAME.unpack(self._front)
        if self._tag in self.wanted:
            array, self._request = self._next_wanted()
            if len(array) != length:
                raise LostPeer(f"rank {self.rank} has sent {length} bytes where {len(array)} were expected")
            self._body = array
        else:
            if self._tag == TAG_CONTROL and length > MAX_CONTROL:
                raise LostPeer(f"rank {self.rank} has sent a control message of {length} bytes")
            self._request, self._body = None, bytearray(length)
        self._view = memoryview(self._body).cast("B") if length else memoryview(b"")

    def _next_wanted(self) -> tuple[Bytes, _SocketRequest]:
        wanted = self.wanted[self._tag]
        first = wanted.popleft()
        if not wanted:
            del self.wanted[self._tag]
        return first

    def _end_body(self) -> None:
        self.n_frames += 1
        if self._tag == TAG_CONTROL:
            message = bytes(self._body)
            if message == FAREWELL:
                self.left = True
            else:
                self.control.append(message)
        elif self._request is not None:
            self._request.n_open -= 1
        elif self._tag in self.wanted:  # since its first bytes came
            array, request = self._next_wanted()
            np.copyto(array, np.frombuffer(self._body, np.uint8))
            request.n_open -= 1
        else:
            self.early.setdefault(self._tag, deque()).append(self._body)
        self._tag, self._request, self._body = -1, None, None
        self._view = memoryview(self._front)

    def _end(self) -> None:
        self.closed = True
        self.socket.close()


class _SocketRequest:
    """Frames that finish together."""

    def __init__(self, transport: SocketTransport, peers: list[_Peer], buffers: Any) -> None:
        self._transport, self._peers, self._buffers = transport, peers, buffers
        self.n_open = 0

    def done(self) -> bool:
        if self.n_open:
            self._transport.pump()
        if self.n_open:
            for peer in self._peers:
                if peer.closed:
                    raise LostPeer(f"rank {peer.rank} has gone in the middle of an exchange")
            return False
        self._buffers = None
        return True


class SocketTransport:
    """Connections to the other ranks of a process set."""

    memory = "host"
    hosts = None

    def __init__(self, rank: int, words: Sequence[int] | np.ndarray, name: bytes) -> None:
        """Join the ranks whose listeners' `words` these are; `name`, 16 bytes, is the same on all of them."""
        self.rank = rank
        raw = np.asarray(words, np.int32).reshape(-1, WORDS_PER_RANK)
        self.size, self._name = len(raw), name
        self._addresses = [
            (socket.inet_ntoa(row[:4]), struct.unpack("<H", row[4:6])[0], row[6:])
            for row in (entry.tobytes() for entry in raw)
        ]
        self._peers: dict[int, _Peer] = {}
        self._calls: dict[int, socket.socket] = {}
        self._deadline = time.monotonic() + CONNECT_SECONDS
        self._selector = selectors.DefaultSelector()
        self._said_farewell = False
        self._lock = threading.RLock()
        farewells.opened(self)

    def ready(self) -> bool:
        if len(self._peers) == self.size - 1:
            return True
        with self._lock:
            for other in range(self.size):
                if other != self.rank and other not in self._peers:
                    connection = listener().take(self._name, other) if other > self.rank else self._call(other)
                    if connection is not None:
                        self._peers[other] = _Peer(other, connection)
                        self._selector.register(connection, selectors.EVENT_READ, self._peers[other])
        if len(self._peers) < self.size - 1 and time.monotonic() > self._deadline:
            missing = min(set(range(self.size)) - set(self._peers) - {self.rank})
            host, port, _ = self._addresses[missing]
            raise LostPeer(
                f"rank {missing} cannot be reached at {host}:{port} after {CONNECT_SECONDS:.0f} s; if that "
                f"is the wrong network, choose another with horovodrun --network-interfaces"
            )
        return len(self._peers) == self.size - 1

    def _call(self, other: int) -> socket.socket | None:
        """A connection to a rank that listens, once it stands."""
        host, port, secret = self._addresses[other]
        call = self._calls.get(other)
        if call is None:
            call = self._calls[other] = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            call.setblocking(False)
        error = call.connect_ex((host, port))
        try:
            call.getpeername()
            call.send(HELLO.pack(secret, self._name, self.rank))
        except OSError as reason:
            if error in _REFUSED or isinstance(reason, ConnectionError):  # its queue may be full: call again
                call.close()
                del self._calls[other]
            return None
        del self._calls[other]
        return call

    def pump(self) -> None:
        """Move on what the kernel takes and has, on all connections."""
        with self._lock:
            for peer in self._peers.values():
                if peer.outbox and not peer.closed:
                    peer.pump()
            for key, _ in self._selector.select(0):
                key.data.pump()
            for peer in self._peers.values():
                if peer.closed and peer.socket.fileno() == -1:
                    self._forget(peer)

    def pause(self, seconds: float) -> None:
        """Send and receive until something has come or gone as a whole, at most so long."""
        n_frames, end = self._n_frames(), time.monotonic() + seconds
        while seconds > 0 and self._n_frames() == n_frames:
            with self._lock:
                for key in list(self._selector.get_map().values()):
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if key.data.outbox else 0)
                    if key.events != events and not key.data.closed:
                        self._selector.modify(key.fileobj, events, key.data)
            if not self._selector.select(seconds):
                return
            self.pump()
            seconds = end - time.monotonic()

    def _n_frames(self) -> int:
        """How many frames have come or gone, and connections ended."""
        return sum(peer.n_frames + peer.closed for peer in self._peers.values())

    def _forget(self, peer: _Peer) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is peer:
                self._selector.unregister(key.fileobj)

    def post(self, message: bytes) -> None:
        with self._lock:
            for peer in self._peers.values():
                peer.send(TAG_CONTROL, message)
        self.pump()

    def heard(self) -> list[tuple[int, bytes]]:
        self.pump()
        messages = []
        with self._lock:
            for rank, peer in self._peers.items():
                while peer.control:
                    messages.append((rank, peer.control.popleft()))
        if not messages:
            for peer in self._peers.values():
                if peer.closed and not peer.left:
                    raise LostPeer(f"the connection to rank {peer.rank} has ended")
        return messages

    def gone(self) -> set[int]:
        return {rank for rank, peer in self._peers.items() if peer.left}

    def transfer(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], tag: int) -> _SocketRequest:
        tag += TAG_DATA
        peers = [self._peers[rank] for rank in {*outgoing, *incoming} if rank != self.rank]
        request = _SocketRequest(self, peers, (outgoing, incoming))
        with self._lock:
            for rank, array in incoming.items():
                if rank != self.rank and len(array):
                    request.n_open += 1
                    self._peers[rank].want(tag, array, request)
            for step in range(1, self.size):
                target = (self.rank + step) % self.size
                if target in outgoing and len(outgoing[target]):
                    request.n_open += 1
                    self._peers[target].send(tag, outgoing[target], request)
        self.pump()
        return request

    def close(self) -> None:
        farewells.closed(self)

    def has_left(self) -> bool:
        """Say farewell, if not done yet, and close the connections once all others have."""
        with self._lock:
            if not self._said_farewell:
                self._said_farewell = True
                for peer in self._peers.values():
                    if not peer.closed:
                        peer.send(TAG_CONTROL, FAREWELL)
            try:
                self.pump()
            except LostPeer:
                pass
            if any(not peer.closed and (peer.outbox or not peer.left) for peer in self._peers.values()):
                return False
            for peer in self._peers.values():
                if not peer.closed:
                    peer._end()
            for call in self._calls.values():
                call.close()
            self._selector.close()
            return True
