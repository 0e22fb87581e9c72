"""Single feature files become shards, in place: the bytes of each row stay the same, and a kill loses none."""

import logging
import os
from pathlib import Path

from .feature_rows import SCALES, FeatureError, checksum_of, decode_row, feature_path, stored_row
from .feature_folder import row_files
from .feature_rows import FOLDER, FeatureShards, ShardWriter, remove_unfinished

log = logging.getLogger(__name__)


def pack_features(
    data_dir: str | os.PathLike,  # feature folder with files hs_{i}.safetensors
    shard_gb: float = 2.0,  # GB of a shard
) -> dict[str, int]:  # counts: packed, damaged
    """Move the rows of single files into shards; their bytes stay the same. May be killed and
    called again. DiskError: the disk is full, read-only or gone; nothing is lost."""
    folder = Path(data_dir)
    rows = sorted(row_files(folder))
    remove_unfinished(folder / FOLDER, alone=False)
    done = FeatureShards(folder, rows[-1] + 1 if rows else 0)
    counts = {"packed": 0, "damaged": 0}

    def delete(finished):
        "The files of rows that are in a whole shard."
        for i in finished:
            feature_path(folder, i).unlink(missing_ok=True)
        counts["packed"] += len(finished)

    writer = None
    try:
        for i in rows:
            path = feature_path(folder, i)
            try:
                tensors, _, checksum = stored_row(path)
                decode_row(path, tensors, None, checksum)
            except FeatureError as e:
                log.warning("left as it is: %s", e)
                counts["damaged"] += 1
                continue
            if i in done and done.stored(i)[1] == checksum:  # of a killed call
                delete([i])
                continue
            if SCALES[1] in tensors:
                tensors[SCALES[0]] = tensors.pop(SCALES[1])
            if writer is None:
                dtype = tensors["hidden_states"].dtype
                writer = ShardWriter(folder, dtype, shard_gb, delete)
            writer.add(i, tensors, checksum_of(tensors))
    finally:
        if writer is not None:
            writer.close()
    return counts
