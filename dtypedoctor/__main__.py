"""``python -m dtypedoctor``, and the console script."""

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
    from dtypedoctor.cli.main import main as run

    try:
        if is_interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = _again
        run()
    except KeyboardInterrupt:  # a second one, while the first ended the command
        _end()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command has ended; so that it does with its own status


def _end(*_: object) -> None:
    """Ctrl-C while the command line is imported, where nothing has been done that would have to be undone."""
    import os

    os.write(2, b"error: interrupted\n")
    os._exit(130)


def _again(lost: "sys.UnraisableHookArgs") -> None:
    """Ctrl-C in a callback of the interpreter, such as that of the lock of an import, is lost there: it comes once more."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    import _thread
    from threading import Timer

    Timer(0.01, _thread.interrupt_main).start()


if __name__ == "__main__":
    main()
