"""Files and the Hub: safetensors whose sizes are checked before they are read, folders of estimators, model cards,
documents that people have.

Paths and repo names come in, from anyone; checked tensors, JSON and text go out. Imports errors and checks only.
"""

from .hub import Folder, Repo, open_source
from .tensor_files import TensorFile, TensorInfo, write_tensor_file

__all__ = [
    "Folder",
    "Repo",
    "TensorFile",
    "TensorInfo",
    "open_source",
    "write_tensor_file",
]
