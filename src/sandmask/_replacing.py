"""Files that appear whole or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write under: it takes the path's place in the end, or goes if anything went wrong.

    What cannot be replaced stays what it is: a link keeps pointing, a device or a pipe is written to.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    except BaseException as error:
        if isinstance(error, OSError) and (error.filename in (temporary, str(temporary)) or error.errno in _FULL):
            error.filename = str(path)  # the name that its reader knows; an error of a full disk has none
        with suppress(OSError):  # the folder may be read-only, or gone: what went wrong first is what to hear of
            temporary.unlink(missing_ok=True)
        raise
