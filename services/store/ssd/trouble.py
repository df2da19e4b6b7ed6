"""What an error of the disk means for the tier. Pure."""

from __future__ import annotations

import errno

from services.store.ssd.files import InUse

UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def reason(error: OSError) -> str:
    """One of ``metrics.STATES``."""
    if isinstance(error, InUse):
        return "in_use"
    if error.errno in UNWRITABLE:
        return "unwritable"
    return "no_space" if error.errno in NO_SPACE else "io"
