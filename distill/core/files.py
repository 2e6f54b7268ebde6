"""Atomic writes of files and folders, durable across a power cut once they have their name.

    write_json(path, value)
    with atomic_path(path) as temporary:           # write to `temporary`; it is renamed to `path` at the end
        figure.savefig(temporary)
    with atomic_folder(folder) as temporary: ...

The temporary name is inside a folder whose name begins with a dot and ends in `.unfinished`, and which is locked while
its writer lives; the next writer of the same path deletes those of killed processes. Nothing else is ever deleted.

The lock is on that folder, not on the file: libraries such as safetensors write a temporary file of their own and
rename it over the name they were given, so a lock on the file would be on an inode that no longer has a name. What they
leave behind when they are killed is inside the folder. They also make files that only their owner may read, so
everything gets the modes of the umask before it gets its name.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

UNFINISHED = ".unfinished"
LOOK_S = 0.1  # between two looks at a lock that another process holds
log = logging.getLogger(__name__)
ATTEMPTS = 100  # to make a temporary folder before another writer deletes it


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False))


def atomic_path(path: Path) -> contextlib.AbstractContextManager[Path]:
    """Yield a temporary path that becomes the file `path` at the end, replacing an existing file."""
    return _replacing(path, folder=False, over=True)


def atomic_folder(folder: Path, *, over: bool = False) -> contextlib.AbstractContextManager[Path]:
    """Yield an empty temporary folder that becomes `folder` at the end.

    Args:
        over: replace a folder that is not empty.

    Raises:
        OSError: ENOTEMPTY where the folder is not empty, without `over`.
    """
    return _replacing(folder, folder=True, over=over)


@contextlib.contextmanager
def _replacing(path: Path, *, folder: bool, over: bool) -> Iterator[Path]:
    if path.exists() and not (path.is_file() or path.is_dir()):  # root could replace /dev/null for the whole machine
        raise ValueError(f"{path}: expected a file or a new name, got a device or pipe")
    prefix = f".{path.name[:50]}."  # the name itself may be as long as a name can be
    if folder:
        make_folder(path.parent)
    _remove_abandoned(path.parent, prefix)
    with _locked_folder(path.parent, prefix) as own:
        temporary = own / path.name
        if folder:
            temporary.mkdir()
        yield temporary
        # Durable by this order: bytes and modes, then the name, then the folder that holds the name. A power cut in
        # between leaves the old file or the whole new one.
        apply_umask(temporary)
        sync(temporary)
        # a rename does not replace a folder that holds files: for a moment there is none of this name
        if over and path.is_dir():
            os.replace(path, own / "replaced")  # deleted with the temporary folder
        os.replace(temporary, path)
        sync(path.parent, deep=False)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, synced to disk."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in {folder, *missing}:  # an existing folder may not be synced yet
        sync(place.parent, deep=False)


def apply_umask(path: Path) -> None:
    """Give a new file, or a folder and everything below it, the modes of the umask, whichever library wrote them."""
    umask = _umask()
    for place in [*(path.rglob("*") if path.is_dir() else ()), path]:
        if not place.is_symlink():
            place.chmod((0o777 if place.is_dir() else 0o666) & ~umask)


def sync(path: Path, *, deep: bool = True) -> None:
    """Sync a file, or a folder's entries and (`deep`) everything below it, to disk."""
    for place in [*(path.rglob("*") if deep and path.is_dir() else ()), path]:
        if fcntl is None and place.is_dir():  # Windows opens no folders, and syncs only what may be written
            continue
        handle = os.open(place, os.O_RDONLY if fcntl is not None else os.O_RDWR)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folders
                raise
        finally:
            os.close(handle)


def try_lock(handle: int, *, shared: bool = False) -> bool | None:
    """Lock an open file until it is closed; return whether that succeeded, None where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


@contextlib.contextmanager
def waiting_lock(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock on a file, which is made if needed and stays; log `waiting` once where another process holds it.

    Where the file system has no locks, nothing is held.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    told = False
    try:
        while try_lock(handle) is False:  # a process that ends, however it does, gives it back
            if not told:
                log.warning(waiting)
                told = True
            time.sleep(LOOK_S)
        yield
    finally:
        os.close(handle)


def unlock(handle: int) -> None:
    """Release the lock at once, even where a forked process still has the file open."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete what killed writers of the same path left, which nobody locks."""
    for old in parent.glob(f"{glob.escape(prefix)}*{UNFINISHED}"):
        with contextlib.suppress(OSError), _locked(old):
            _remove(old)


@contextlib.contextmanager
def _locked_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new locked folder in `parent`, and delete it at the end.

    Another writer may find the folder before it is locked and delete it as abandoned: then the lock fails, or is on a
    folder without a name, and another one is made.
    """
    for _ in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=UNFINISHED, dir=parent))
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_locked(folder))
                if not folder.exists():
                    continue
            except (BlockingIOError, FileNotFoundError):
                continue
            try:
                yield folder
            finally:
                _remove(folder)
            return
    raise OSError(errno.EBUSY, "other writers keep deleting the temporary folder", str(parent))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock on `path`; raises BlockingIOError where another process holds it."""
    if fcntl is None:  # an open folder cannot be renamed on Windows
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        if try_lock(handle) is False:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
        yield
    finally:
        os.close(handle)


def _umask() -> int:
    # it can only be read by setting it
    before = os.umask(0)
    os.umask(before)
    return before


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def nearest_existing(path: Path) -> Path:
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds `path`, or would hold it."""
    return shutil.disk_usage(nearest_existing(path)).free


def mount_of(path: Path) -> Path:
    """Return the mount point of the file system that holds `path`, or would hold it."""
    place = nearest_existing(path)
    return next(folder for folder in (place, *place.parents) if os.path.ismount(folder) or folder == folder.parent)


def suggest_path(name: str) -> str:
    """Return `; did you mean X?` for a path that does not exist but has a similarly named neighbour, else ""."""
    path = Path(name).expanduser()
    there = path
    try:
        # up to the first part of the path that is missing: its neighbours may have a similar name
        while not there.parent.is_dir():
            there = there.parent
        near = get_close_matches(there.name, [entry.name for entry in there.parent.iterdir()], n=1, cutoff=0.6)
    except (OSError, ValueError):  # a folder that may not be read, or a name that no file system takes
        return ""
    return f"; did you mean {there.parent / near[0] / path.relative_to(there)}?" if near else ""
