"""Check that every record of an LMDB is stored within data.mdb: `python lmdb_check.py DIR`.

Reading a damaged LMDB can kill the process with SIGBUS or SIGABRT, because LMDB 0.9 and DALI 2.4 map the file into
memory and follow references to places beyond its end. Therefore, this script runs in its own process. It imports
nothing from this project, so it starts quickly and can be run by its path.

If the LMDB is damaged, the script prints the reason and the exit code is 2; otherwise, the exit code is 0.
"""

import os
import sys

import lmdb
import numpy as np


def problem(folder):
    """Return the reason why an LMDB cannot be used, or None if it is valid."""
    path = os.path.join(folder, "data.mdb")
    if not os.path.isfile(path):
        return "data.mdb is missing"
    try:
        environment = lmdb.open(folder, readonly=True, lock=False, create=False)
        entries, page = environment.stat()["entries"], environment.stat()["psize"]
        size, pages = os.path.getsize(path), environment.info()["last_pgno"] + 1
        if size < pages * page:
            return f"data.mdb has {size} bytes instead of at least {pages * page}"
        start = _mapped_at(path)
        with environment.begin(buffers=True) as transaction:
            count, last = 0, None
            for key, value in transaction.cursor():
                key, count = bytes(key), count + 1
                place = np.frombuffer(value, np.uint8).__array_interface__["data"][0] - start if value else 0
                if not 0 <= place <= size - len(value):
                    return f"record {key!r} is outside the file"
                if count > entries or (last is not None and key <= last):
                    return f"record {key!r} is out of order"
                last = key
        if count != entries:
            return f"only {count} of {entries} records were found"
    except (lmdb.Error, OSError, OverflowError, MemoryError, ValueError) as e:
        return str(e) or type(e).__name__
    return None


def _mapped_at(path):
    """Return the memory address at which a file is mapped into this process."""
    path = os.path.realpath(path)
    with open("/proc/self/maps") as f:
        addresses = [line.split("-")[0] for line in f if line.rstrip("\n").endswith(f" {path}")]
    return int(addresses[0], 16)


if __name__ == "__main__":
    reason = problem(sys.argv[1])
    if reason is not None:
        print(" ".join(reason.split()))
        sys.exit(2)
