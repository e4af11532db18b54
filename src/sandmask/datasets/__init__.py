"""Datasets of several environments.

    from sandmask.datasets import load_dataset, resolve_environment

    spirals = load_dataset("Spirals")
    pacs = load_dataset("PACS", data_dir="data", cache="memory")
    mine = load_dataset("photos/by_hospital")          # root/domain/class/*.jpg
    listed = load_dataset("scans.csv")                 # a manifest: path,class,domain
    measured = load_dataset("patients.npz")            # arrays: inputs, class, domain
    shared = load_dataset("hf:flwrlabs/pacs")          # a Hugging Face dataset: image, label, domain
    held_out = resolve_environment(pacs, "sketch")     # by name or index

Your own dataset needs a `Dataset` (or a `TensorDataset`) and a `DatasetEntry` that is registered in `DATASETS`.
"""

from sandmask.datasets._augment import Augmentation
from sandmask.datasets._base import (
    DATASETS,
    Dataset,
    DatasetEntry,
    HparamScope,
    Inventory,
    TensorDataset,
    take_inventory,
)
from sandmask.datasets._decode import CorruptImageError
from sandmask.datasets._images import ImageDataset
from sandmask.datasets._lookup import (
    absolute,
    dataset_entry,
    double_meaning,
    is_registered,
    load_dataset,
    resolve_environment,
)
from sandmask.datasets._scan import LeftOut, data_folder
from sandmask.datasets._tree import ImageTree, scan_images

__all__ = [
    "DATASETS",
    "Augmentation",
    "CorruptImageError",
    "Dataset",
    "DatasetEntry",
    "HparamScope",
    "ImageDataset",
    "ImageTree",
    "Inventory",
    "LeftOut",
    "TensorDataset",
    "absolute",
    "data_folder",
    "dataset_entry",
    "double_meaning",
    "is_registered",
    "load_dataset",
    "resolve_environment",
    "scan_images",
    "take_inventory",
]
