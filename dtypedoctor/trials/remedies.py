"""The name under which plug-ins know :mod:`dtypedoctor.lab.trials.changes`."""

from dtypedoctor.lab.trials.changes import *
