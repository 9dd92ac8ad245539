"""`.metadata`: the contents of a checkpoint as torch.distributed.checkpoint keeps them, for its FileSystemReader."""

from __future__ import annotations

import io
import pickle

import torch
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # the class that stock readers find in the pickle; nothing public makes one
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierzero.checkpoint.index import DATA, Index

_VERSION = "1.0.0"  # of torch's format


def metadata_bytes(index: Index, name: str) -> bytes:
    """The pickle, for a checkpoint called `name`. A tied tensor is listed under every name and stored once."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, of in [*((key, key) for key in index.tensors), *index.aliases.items()]:
        stored = index.tensors[of]
        chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in stored.pieces]
        described[key] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)
        for number, piece in enumerate(stored.pieces):
            storage[MetadataIndex(key, piece.offsets, number)] = _StorageInfo(DATA, piece.start, piece.length)
    for key, value in index.objects.items():
        described[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(DATA, value.start, value.length)
    paths = {key: tuple(path) for key, path in index.paths.items()}
    whole = Metadata(described, planner_data=paths, storage_data=storage, storage_meta=StorageMeta(checkpoint_id=name))
    whole.version = _VERSION
    out = io.BytesIO()
    pickle.dump(whole, out)
    return out.getvalue()
