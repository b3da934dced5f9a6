"""The limit of files that a process may have open: raised at a command's start, refused where it cannot do.

A run holds a handle for each raster and reading thread, and a rank one for each peer. Met on the way, the limit would
end the run with words about one innocent file. Standard library only.
"""

from __future__ import annotations

import os
import resource

from tiledseg.errors import ConfigError

_LEAST = 64  # what one rank with one image and a few reading threads takes, and room for libraries
_ENOUGH = 65536  # the most that is asked for: some programs walk through all numbers below the limit


def allow_open_files(enough: int = _ENOUGH, least: int = _LEAST, what: str = "") -> None:
    """Raise this process's limit as far as is `enough` and the system lets it.

    Raises ConfigError where that is fewer than `least`; `what`: whose they are, where it is not any run's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if hard != resource.RLIM_INFINITY and hard < least:
        raise _too_few(hard, least, what)


def check_parent(least: int, what: str) -> None:
    """Raise ConfigError where this process's parent may not have `least` files open, and the system says so."""
    try:
        soft, _ = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
    except (AttributeError, OSError):  # not Linux, or another user's
        return
    if soft != resource.RLIM_INFINITY and soft < least:
        raise _too_few(soft, least, what)


def _too_few(limit: int, least: int, what: str) -> ConfigError:
    return ConfigError(
        f"no more than {limit} files may be open here, {least} are needed{what and f' {what}'}; raise it (ulimit -n)"
    )
