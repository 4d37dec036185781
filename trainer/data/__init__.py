"""Images from files: scanning, decoding, the made set, and the loaders over them."""

from trainer.data.images import ImageFiles, ImageSet, normalise, scan
from trainer.data.loader import Feed, ImageFeed, LoaderPlan, build_loaders, plan_loader
from trainer.data.synthetic import cache_folder, make_jpegs

__all__ = [
    "Feed",
    "ImageFeed",
    "ImageFiles",
    "ImageSet",
    "LoaderPlan",
    "build_loaders",
    "cache_folder",
    "make_jpegs",
    "normalise",
    "plan_loader",
    "scan",
]
