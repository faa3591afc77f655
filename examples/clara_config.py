"""A training configuration of NVIDIA's Clara Train SDK, with its Smart Cache: `pip install 'stallfree[medical]'`."""

import json
import tempfile
from pathlib import Path

import nibabel
import numpy as np

import stallfree as sf

BOTH = ["image", "label"]
CONFIG = {
    "train": {
        "pre_transforms": [
            {"name": "LoadNifti", "args": {"fields": BOTH}},
            {"name": "ConvertToChannelsFirst", "args": {"fields": BOTH}},
            {"name": "NormalizeNonzeroIntensities", "args": {"fields": "image"}},
            {"name": "SymmetricPadder", "args": {"fields": BOTH, "size": [16, 16, 16]}},
            {"name": "CropFixedSizeRandomCenter", "args": {"fields": BOTH, "size": [12, 12, 12]}},
            {"name": "RandomAxisFlip", "args": {"fields": BOTH, "probability": 0.5}},
            {"name": "AddGaussianNoise", "args": {"fields": "image", "probability": 0.5}},
        ],
        "image_pipeline": {
            "name": "SegmentationImagePipelineWithCache",
            "args": {
                "data_list_file_path": "{DATASET_JSON}",
                "data_file_base_dir": "{DATA_ROOT}",
                "data_list_key": "training",
                "output_crop_size": [12, 12, 12],
                "output_batch_size": 3,
                "num_workers": 1,
                "prefetch_size": 0,
                "num_cache_objects": 9,
                "replace_percent": 0.3,
            },
        },
    }
}

with tempfile.TemporaryDirectory() as folder:
    root = Path(folder)
    entries = []
    for number in range(15):
        for field in BOTH:
            (root / field).mkdir(exist_ok=True)
            voxels = np.random.default_rng(number).integers(0, 100 if field == "image" else 2, (14, 15, 16))
            nibabel.save(nibabel.Nifti1Image(voxels.astype(np.int16), np.eye(4)), root / field / f"{number}.nii.gz")
        entries.append({field: f"{field}/{number}.nii.gz" for field in BOTH})
    (root / "list.json").write_text(json.dumps({"training": entries}))
    (root / "train_config.json").write_text(json.dumps(CONFIG))

    with sf.clara.load(root / "train_config.json", DATASET_JSON=root / "list.json", DATA_ROOT=root) as pipelines:
        assert pipelines.train is not None
        data = pipelines.train.dataset
        assert isinstance(data, sf.SmartCacheDataset)
        for epoch in range(4):
            for batch in pipelines.train:
                image = batch["image"]
            start = data.stats().window_start
            print(f"epoch {epoch}: {len(pipelines.train)} batches {tuple(image.shape)}, the window begins at {start}")
        del batch, image
