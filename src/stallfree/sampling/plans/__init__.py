"""Plans: the samples of an epoch, and their order."""

from stallfree.sampling.plans.importance import ImportanceSampler
from stallfree.sampling.plans.plan import Plan, make_plan
from stallfree.sampling.plans.schedule import BySamples

__all__ = ["BySamples", "ImportanceSampler", "Plan", "make_plan"]
