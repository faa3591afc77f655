"""Plans: which samples an epoch takes, in which order."""

from stallfree.plans.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
