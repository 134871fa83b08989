"""Directories that cannot be renamed or replaced, like mount points."""

import errno
import os


def refuse_to_rename_folders(monkeypatch):
    """Make every renaming of a directory fail, as for mount points and on gcsfuse."""
    for name in ("rename", "replace"):
        rename = getattr(os, name)

        def refuse(source, target, rename=rename):
            if os.path.isdir(source):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(target))
            rename(source, target)

        monkeypatch.setattr(os, name, refuse)
