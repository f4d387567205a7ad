"""How many files a process may have open: as many as its system lets it. Its children may have as
many.

Systems start processes with a soft limit of 1,024, for programs that use select(2); each connection
is a file.
"""

from __future__ import annotations

import resource

__all__ = ["raise_file_limit"]

# The kernel's own default for the hard limit. Some systems allow 2**30, and libraries have loops
# over all numbers.
_MOST = 1 << 20


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
