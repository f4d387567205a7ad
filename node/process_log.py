"""Where a process of ours writes its log, and in which form: stderr, as text or JSON. Its children do the same.

Owns the variable by which they hear of it. What a line looks like is wire/log_lines.py's.
"""

from __future__ import annotations

import logging
import os

from wire.config_checks import check_log_format
from wire.log_lines import formatter

__all__ = ["LOG_FORMAT", "log_to_stderr"]

LOG_FORMAT = "KVRELAY_LOG_FORMAT"


def log_to_stderr(process: str, log_format: str = "", worker: int | None = None) -> None:
    """Log from INFO on. `log_format` empty: as the parent process does, or as text. Raises ConfigError.

    `worker`: the number of one of several processes that do the same."""
    log_format = log_format or os.environ.get(LOG_FORMAT) or "text"
    check_log_format(log_format)
    os.environ[LOG_FORMAT] = log_format
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(log_format, process, worker))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
