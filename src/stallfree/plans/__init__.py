"""Plans: which samples an epoch takes, in which order."""

from stallfree.plans.importance import ImportanceSampler
from stallfree.plans.plan import Plan, make_plan

__all__ = ["ImportanceSampler", "Plan", "make_plan"]
