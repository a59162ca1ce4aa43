"""Several runs of train.main in the same processes of a job."""

import functools
import itertools

from paddle_resnet.job import exchange
from paddle_resnet.machine import compat

_runs = itertools.count()
_store = exchange._store


def allow_reruns():
    compat.start_gloo = functools.cache(compat.start_gloo)  # Paddle starts Gloo only once per process


def start_run(store=_store):
    """Reset the state of exchange.py, because a run must begin with new state."""
    exchange._exchanges = exchange._polls = 0
    exchange._stop_at = exchange._last_gather = None
    number = next(_runs)
    exchange._store = functools.cache(lambda: Store(store(), f"run{number}/"))


class Store:
    """Paddle's store, with a prefix for the keys, so that it looks new to each run of a process."""

    def __init__(self, store, prefix):
        self._store, self._prefix = store, prefix

    def get(self, key):
        return self._store.get(self._prefix + key)

    def set(self, key, value):
        self._store.set(self._prefix + key, value)

    def add(self, key, number):
        return self._store.add(self._prefix + key, number)
