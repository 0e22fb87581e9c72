"""A stand-in for Mooncake's store between processes: an object is a file in $MOONCAKE_FOLDER, whole or absent. It has
what `hs-connectors` calls, and answers with Mooncake's status codes."""

import ctypes
import os
from pathlib import Path

NOT_FOUND = -704


class MooncakeDistributedStore:
    def setup(self, *_):
        self.folder, self.lent = Path(os.environ["MOONCAKE_FOLDER"]), {}
        return 0

    def register_buffer(self, pointer, n):
        self.lent[pointer] = n
        return 0

    def unregister_buffer(self, pointer):
        return 0 if self.lent.pop(pointer, None) else -1

    def put(self, key, value):
        beside = self.folder / f".{key}.{os.getpid()}"
        beside.write_bytes(value)
        beside.rename(self.folder / key)
        return 0

    def put_from(self, key, pointer, n):
        assert n <= self.lent[pointer]
        return self.put(key, ctypes.string_at(pointer, n))

    def is_exist(self, key):
        return int((self.folder / key).is_file())

    def get_size(self, key):
        return (self.folder / key).stat().st_size if self.is_exist(key) else NOT_FOUND

    def get_into(self, key, pointer, n):
        assert n <= self.lent[pointer]
        value = (self.folder / key).read_bytes()
        ctypes.memmove(pointer, value, len(value))
        return len(value)

    def remove(self, key, force=False):
        try:
            (self.folder / key).unlink()
            return 0
        except FileNotFoundError:
            return NOT_FOUND
