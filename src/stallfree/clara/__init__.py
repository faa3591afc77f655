"""Data pipelines from training configurations of NVIDIA's Clara Train SDK.

load("train_config.json", ...)      pipelines.py   sections to data sets and loaders
  ├── configuration.py              JSON, placeholders, components
  ├── arguments.py                  the arguments of an `image_pipeline`
  ├── data_list.py                  the data list as a source
  └── registry.py                   transforms by name: ours, MONAI's, the user's
        ├── nifti.py                loading
        ├── transforms.py           deterministic transforms
        ├── augment.py              random transforms
        └── fields.py               their common base classes
"""

from stallfree.clara.pipelines import Pipeline, Pipelines, load

__all__ = ["Pipeline", "Pipelines", "load"]
