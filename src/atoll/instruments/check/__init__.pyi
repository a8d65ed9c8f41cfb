from . import facts
from .at_most_once import AtMostOnce
from .blast_radius import BlastRadius
from .bounded import Bounded
from .checker import Checker, Checkers, Violation
from .commit_first import CommitFirst
from .everything import all_checkers
from .finite import Finite
from .influence import BoundedInfluence
from .ledger import LedgerAddsUp
from .liveness import Liveness
from .loud import Loud
from .replayed import ReplayIsExact
from .single_writer import SingleWriter
from .trust import BoundedTrust
from .version_chain import VersionChain

__all__ = [
    "AtMostOnce",
    "BlastRadius",
    "Bounded",
    "BoundedInfluence",
    "BoundedTrust",
    "Checker",
    "Checkers",
    "CommitFirst",
    "Finite",
    "LedgerAddsUp",
    "Liveness",
    "Loud",
    "ReplayIsExact",
    "SingleWriter",
    "VersionChain",
    "Violation",
    "all_checkers",
    "facts",
]
