"""``python -m dtypedoctor``, and the console script."""

import atexit
import gc
import os
import sys


def main() -> None:
    """Runs the command line. Nothing is imported from the working directory, where ``python -m`` would look first."""
    import signal

    is_interrupted = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job of a shell is not
    if is_interrupted:
        signal.signal(signal.SIGINT, _end)
    home = __file__.rsplit("/", 2)[0]
    if __name__ == "__main__" and not sys.flags.safe_path and sys.path[:1] != [home]:
        del sys.path[0]
    gc.set_threshold(_THRESHOLD, *gc.get_threshold()[1:])
    from dtypedoctor.cli.main import main as run
    from dtypedoctor.interruptions import interrupt

    status: object = None
    try:
        if is_interrupted:
            signal.signal(signal.SIGINT, interrupt)
            sys.unraisablehook = _again
        run()
    except KeyboardInterrupt:  # a second one, while the first ended the command
        _end()
    except SystemExit as leaving:
        status = leaving.code
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command has ended; so that it does with its own status
    _leave(status)


_THRESHOLD = 50_000
"""Objects after which Python looks for garbage, instead of 700: a command that imports 400 modules and makes none spends a tenth of its time on it."""


_last_words = [b"error: interrupted\n"]
"""What is yet to be said: a second Ctrl-C comes in the middle of what the first one has called."""


def _end(*_: object) -> None:
    """Ctrl-C while the command line is imported, where nothing has been done that would have to be undone."""
    if _last_words:
        os.write(2, _last_words.pop())
        os._exit(130)


def _again(lost: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C in a callback of the interpreter, such as that of the lock of an import, is lost there: it comes once more.

    Python also tells here of a signal that came just before it was to be ignored ("ignored due to race condition"): that is what was meant.
    """
    if lost.exc_type is OSError and "race condition" in str(lost.exc_value):
        return
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    import _thread
    from threading import Timer

    Timer(0.01, _thread.interrupt_main).start()


def _leave(status: object) -> None:
    """Ends the process without taking its modules and objects apart one by one, a tenth of what a short command costs."""
    import threading
    from contextlib import suppress

    if not isinstance(status, int) or threading.active_count() > 1:
        raise SystemExit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, nobody reads it, it is closed
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
