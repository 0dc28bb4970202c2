"""``%load_ext dtypedoctor`` in a notebook: ``%%doctor`` watches one cell and shows what it finds under the cell's output.

IPython is there where this module is imported: nobody else imports it.
"""

import ast
import shlex
from argparse import ArgumentParser
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from dtypedoctor.errors import UsageError as RefusedError
from dtypedoctor.inprocess import numbered, watch
from dtypedoctor.instrument.dtype_lines import follow_notebook, leave_notebook


def load(shell: InteractiveShell) -> None:
    """Registers ``%%doctor`` in this shell; a second time replaces it."""
    shell.register_magic_function(_Doctor(shell), magic_kind="cell", magic_name="doctor")
    follow_notebook()


def unload(shell: InteractiveShell) -> None:
    """Takes ``%%doctor`` out of this shell again."""
    shell.magics_manager.magics["cell"].pop("doctor", None)
    leave_notebook()


_VALUE = "__dtypedoctor_value__"
"""What the last expression of a cell is kept as, until it is returned."""


class _Options(ArgumentParser):
    """The options behind ``%%doctor``; a wrong one is the user's error and does not end the kernel."""

    def __init__(self) -> None:
        super().__init__(prog="%%doctor", add_help=False)
        self.add_argument("--out", help="run directory to create")
        self.add_argument("--no-replay", dest="replay", action="store_false", help="do not replay what fails")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%doctor: {message}. Known: --out DIR, --no-replay")


def _free(out: str | None) -> Path | None:
    """Where a cell that is run again records: the folder that was named, or ``OUT-2``, ``OUT-3``, …"""
    if out is None:
        return None
    return next(path for call in count(1) if (path := numbered(Path(out), call)) is not None and not path.exists())


class _Doctor:
    """The magic of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.__doc__ = (
            "Watches this cell and shows the findings under its output.\n\n"
            "%%doctor [--out DIR] [--no-replay]: what dtypedoctor.watch() takes. The report is\n"
            "also in DIR, or in runs/ of the working directory."
        )

    def __call__(self, line: str, cell: str) -> object:
        """Runs the cell in the user's namespace, and shows the report when all of the cell's own output is out.

        Returns:
            The value of the cell's last expression, as the cell alone has it.

        Raises:
            UsageError: an unknown option, or the run directory cannot be used; IPython shows no traceback of it.
            BaseException: what the cell raises, as it was raised.
        """
        options = _Options().parse_args(shlex.split(line))
        block = watch(out=_free(options.out), replay=options.replay)
        try:
            block.__enter__()
        except RefusedError as error:
            raise UsageError(f"%%doctor: {error}") from error
        # Shows the report once the cell has ended: under the traceback where it has raised
        events = self._shell.events

        def show(*_: Any) -> None:
            events.unregister("post_run_cell", show)
            if block.report is not None:
                from IPython.display import display

                display(block.report)

        events.register("post_run_cell", show)
        with ExitStack() as stack:
            stack.push(block.__exit__)
            return self._run(cell)

    def _run(self, cell: str) -> object:
        shell = self._shell
        source = "\n" + shell.transform_cell(
            cell
        )  # the line of the magic, so that lines are counted as in the notebook
        number = len(shell.user_ns.get("In", [])) - 1  # execution_count is the next cell's already
        name = shell.compile.cache(source, number, raw_code=cell)
        tree = ast.parse(source, name)
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            kept = ast.copy_location(ast.Name(_VALUE, ast.Store()), last)
            tree.body[-1] = ast.copy_location(ast.Assign([kept], last.value), last)
        exec(shell.compile(tree, name, "exec"), shell.user_ns)  # noqa: S102  (the user's own cell)
        value = shell.user_ns.pop(_VALUE, None)
        return None if source.rstrip().endswith(";") else value
