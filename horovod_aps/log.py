"""Messages for people who look inside: HOROVOD_APS_LOG=debug prints what every rank exchanges."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("horovod_aps")


def _set_up() -> None:
    level = os.environ.get("HOROVOD_APS_LOG", "warning").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"HOROVOD_APS_LOG must be debug, info, warning or error, got {level.lower()!r}")
    handler = logging.StreamHandler(sys.stderr)
    rank = os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "?"
    handler.setFormatter(logging.Formatter(f"[horovod_aps rank {rank} %(relativeCreated).0f ms] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


_set_up()


def trace(message: str, *args: object) -> None:
    """Log at debug level."""
    logger.debug(message, *args)
