"""The name under which plug-ins know :mod:`dtypedoctor.lab.workloads.context`."""

from dtypedoctor.lab.workloads.context import *
