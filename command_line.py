"""How the scripts end."""

import os
import sys
from collections.abc import Callable


def run_main(main: Callable[[], None]) -> None:
    """Call a script's main; exit code 130 (Ctrl-C) ends the process at once.

    XLA's compiler threads outlive the Python interpreter, so that an orderly exit in the middle of
    a compilation ends in a segmentation fault.
    """
    try:
        main()
    except SystemExit as stop:
        if stop.code == 130:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)
        raise
