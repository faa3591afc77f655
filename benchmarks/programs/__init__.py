"""Data sets as users of public libraries write them, one per file: read, decode and augment in `__getitem__`.

Each module has `make(root)`, which gives the data set over the files below `root` (see `files.py`), and `OPTIONS` of
the loader. Nothing in them knows of stallfree.
"""

PROGRAMS = (
    "torchvision_folder",
    "csv_labels",
    "timm_dataset",
    "huggingface_images",
    "polygon_masks",
    "monai_dictionaries",
    "nibabel_slices",
    "torchaudio_spectrograms",
    "numpy_archives",
    "saved_tensors",
    "opencv_albumentations",
)
