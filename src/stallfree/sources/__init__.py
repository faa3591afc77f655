"""Sources of samples, with separate fetch and prep."""

from stallfree.sources.base import BaseSource
from stallfree.sources.cut_source import CutSource
from stallfree.sources.cutting.cut import cut
from stallfree.sources.decode import DecodeImage
from stallfree.sources.files import FileDataset
from stallfree.sources.image_folder import IMAGE_EXTENSIONS, ImageFolder
from stallfree.sources.mapped import MapSource, SubsetSource, as_source
from stallfree.sources.tar import TarDataset
from stallfree.sources.throttle import ThrottledSource

__all__ = [
    "IMAGE_EXTENSIONS",
    "BaseSource",
    "CutSource",
    "DecodeImage",
    "FileDataset",
    "ImageFolder",
    "MapSource",
    "SubsetSource",
    "TarDataset",
    "ThrottledSource",
    "as_source",
    "cut",
]
