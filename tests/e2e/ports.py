"""Ports for jobs of tests that must be told one before they start."""

import os
import random
import socket
from pathlib import Path


def unused_port() -> int:
    """A port of localhost that nobody listens at, below those that the kernel hands out itself: no connection takes it before the job does."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    chance = random.Random(os.urandom(8))
    while True:
        port = chance.randrange(min(10_000, first - 1), first)
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)):
                return port
