"""Data pipelines out of training configurations of NVIDIA's Clara Train SDK.

load("train_config.json", ...)      pipelines.py   sections to data sets and loaders
  ├── configuration.py              JSON, placeholders, components
  ├── arguments.py                  the arguments of an `image_pipeline`
  ├── data_list.py                  the data list as a source
  └── registry.py                   transforms by name: ours, MONAI's, the user's
        ├── nifti.py                loading
        ├── transforms.py           deterministic ones
        ├── augment.py              random ones
        └── fields.py               what they share
"""

from stallfree.clara.pipelines import Pipeline, Pipelines, load

__all__ = ["Pipeline", "Pipelines", "load"]
