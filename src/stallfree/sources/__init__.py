"""Sources of samples, with fetching apart from preparing."""

from stallfree.sources.base import BaseSource
from stallfree.sources.decode import DecodeImage
from stallfree.sources.files import FileDataset
from stallfree.sources.image_folder import IMAGE_EXTENSIONS, ImageFolder
from stallfree.sources.mapped import MapSource, SubsetSource, as_source
from stallfree.sources.throttle import ThrottledSource

__all__ = [
    "IMAGE_EXTENSIONS",
    "BaseSource",
    "DecodeImage",
    "FileDataset",
    "ImageFolder",
    "MapSource",
    "SubsetSource",
    "ThrottledSource",
    "as_source",
]
