"""Data sets as users of public libraries write them, one per file: read, decode and augment in `__getitem__`.

Each module has `make(root)`, which gives the data set over the files below `root` (see `files.py`), and `OPTIONS` of
the loader. Nothing in them knows of stallfree.
"""

PROGRAMS = {
    "torchvision_folder": "photos",
    "csv_labels": "photos",
    "timm_dataset": "photos",
    "huggingface_images": "photos",
    "polygon_masks": "photos",
    "monai_dictionaries": "volumes",
    "nibabel_slices": "volumes",
    "torchaudio_spectrograms": "words",
    "numpy_archives": "features",
    "saved_tensors": "clips",
    "opencv_albumentations": "photos",
    "hdf5_spectra": "spectra",
}
"""The modules, and which files they read."""

NATIVE = ("hdf5_spectra",)
"""Those whose libraries open files themselves, and are not served."""
