"""Messages for people who look inside: HOROVOD_APS_LOG=debug prints what every rank exchanges."""

from __future__ import annotations

import logging
import sys

from horovod_aps import config

logger = logging.getLogger("horovod_aps")


class _RankFormatter(logging.Formatter):
    """Puts the rank in front; asked anew for every line, since an elastic reset changes it."""

    def format(self, record: logging.LogRecord) -> str:
        rank = config.launcher_rank() or "?"
        return f"[horovod_aps rank {rank} {record.relativeCreated:.0f} ms] {super().format(record)}"


def _set_up() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RankFormatter())
    logger.addHandler(handler)
    logger.setLevel(config.log_level().upper())
    logger.propagate = False


_set_up()


def trace(message: str, *args: object) -> None:
    """Log at debug level."""
    logger.debug(message, *args)
