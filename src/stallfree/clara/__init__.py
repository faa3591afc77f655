"""Data pipelines from training configurations of NVIDIA's Clara Train SDK.

load("train_config.json", ...)      pipelines.py       data list, data sets and loaders
  └── configuration.py              JSON, placeholders, arguments; transforms by name: Clara's in MONAI's classes,
                                    MONAI's own, the user's
"""

from stallfree.clara.pipelines import Pipeline, Pipelines, load

__all__ = ["Pipeline", "Pipelines", "load"]
