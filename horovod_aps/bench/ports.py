"""A TCP port for ranks that meet at an address, chosen before they start."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port of this machine that nobody listens on.

    It is below those that Linux gives to sockets which ask for any (from 32768 on), for a launcher opens such sockets
    between this call and the start of the ranks.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)  # a seed that tests set would give all the same port
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
