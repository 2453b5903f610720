"""A switch with latency: forwards each Ethernet frame a fixed time after it arrived.

Started by cluster.py inside the switch's network namespace, in place of the bridge, when a delay is asked
for. The kernel's own tool for this is `tc ... netem`, which many small kernels (the reference machine's
too) leave out. Frames are moved with their offload headers, so that TCP's 64 kB segments stay whole: 1
Gbit/s is then about 2,000 frames a second, which Python moves with a few per cent of one core.
"""

import argparse
import heapq
import select
import socket
import time

SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
ETH_P_ALL = 0x0003
VNET_HEADER_BYTES = 10
MAX_FRAME_BYTES = 1 << 17


def open_port(interface: str) -> socket.socket:
    """A raw socket that sees what arrives at one interface, with the offload header before each frame."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 64 << 20)
    port.bind((interface, ETH_P_ALL))
    port.setblocking(False)
    return port


def forward(interfaces: list[str], delay_seconds: float) -> None:
    """Run until killed. Unknown destinations go to every other port, as in any learning switch."""
    ports = [open_port(name) for name in interfaces]
    port_of_fd = {port.fileno(): k for k, port in enumerate(ports)}
    poller = select.poll()
    for port in ports:
        poller.register(port, select.POLLIN)
    learned: dict[bytes, int] = {}
    waiting: list[tuple[float, int, int, bytes]] = []  # due time, serial number (keeps order), source port, frame
    serial = 0
    print("ready", flush=True)
    while True:
        timeout_ms = None
        if waiting:
            timeout_ms = max(0.0, (waiting[0][0] - time.monotonic()) * 1e3)
        for fd, _ in poller.poll(timeout_ms):
            source = port_of_fd[fd]
            arrived = time.monotonic()
            while True:
                try:
                    frame = ports[source].recv(MAX_FRAME_BYTES)
                except BlockingIOError:
                    break
                serial += 1
                heapq.heappush(waiting, (arrived + delay_seconds, serial, source, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, source, frame = heapq.heappop(waiting)
            destination = frame[VNET_HEADER_BYTES : VNET_HEADER_BYTES + 6]
            learned[frame[VNET_HEADER_BYTES + 6 : VNET_HEADER_BYTES + 12]] = source
            known = learned.get(destination)
            targets = [known] if known is not None else [k for k in range(len(ports)) if k != source]
            for k in targets:
                try:
                    ports[k].send(frame)
                except OSError:
                    pass  # the port's queue is full: a switch drops the frame, and TCP sends it again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("interfaces", nargs="+")
    arguments = parser.parse_args()
    forward(arguments.interfaces, arguments.delay_ms / 1e3)


if __name__ == "__main__":
    main()
