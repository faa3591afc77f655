"""Plans: which samples an epoch takes, in which order."""

from stallfree.plans.importance import ImportanceSampler
from stallfree.plans.plan import Plan, make_plan
from stallfree.plans.schedule import BySamples

__all__ = ["BySamples", "ImportanceSampler", "Plan", "make_plan"]
