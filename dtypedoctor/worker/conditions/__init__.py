"""Conditions of a whole process that are switched from outside, so that a run shows whether a failure needs them."""

from dtypedoctor.worker.conditions.attention import EAGER_ATTENTION
from dtypedoctor.worker.conditions.autocast import AUTOCAST_OFF
from dtypedoctor.worker.conditions.compiling import COMPILE_OFF
from dtypedoctor.worker.conditions.contract import Condition
from dtypedoctor.worker.conditions.scaling import LOSS_SCALE_ONE

CONDITIONS: dict[str, Condition] = {
    condition.id: condition for condition in (AUTOCAST_OFF, EAGER_ATTENTION, COMPILE_OFF, LOSS_SCALE_ONE)
}
"""Every condition by its id; the same ids as ``ConditionName`` of a scenario."""
