"""Fleets of small neural networks that grow while they train."""

from . import control, errors, nn, weights
from ._meristem import VERSION as __version__
from ._loss import OnDevice
from ._meristem import Array
from .comm import Comm, Int8, OuterStep, TopK
from .data import Batch, Dataset, GatherBatches, clear_cache
from .errors import MeristemError
from .fleet import Fleet
from .growth import growth_bench
from .hosts import Host
from .learners import Learners
from .policy import train_policy
from .runs import Run, Searcher, resume, train, verify
from .sweeps import Sweep, replay, sweep

__all__ = [
    "Array",
    "Batch",
    "Comm",
    "Dataset",
    "Fleet",
    "GatherBatches",
    "Host",
    "Int8",
    "Learners",
    "MeristemError",
    "OnDevice",
    "OuterStep",
    "Run",
    "Sweep",
    "TopK",
    "__version__",
    "clear_cache",
    "control",
    "errors",
    "growth_bench",
    "nn",
    "replay",
    "resume",
    "sweep",
    "train",
    "train_policy",
    "verify",
    "weights",
]
