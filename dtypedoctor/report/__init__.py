"""Reports: what is said about a run, laid out as documents that each format draws."""

from pkgutil import iter_modules

_TERMINAL = "to_terminal"
"""What draws at the prompt, on a console."""
FORMATS = tuple(
    module.name.removeprefix("to_")
    for module in iter_modules(__path__)
    if module.name.startswith("to_") and module.name != _TERMINAL
)
"""The formats that come with dtypedoctor, by the names of their files: a command line names them and imports none."""
