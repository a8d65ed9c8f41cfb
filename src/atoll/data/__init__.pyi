from .island import IslandPlace
from .loaders import FollowingLoader, Loader, iterable, loader, stream
from .mds import Shards, shards
from .order import place
from .raw import Chunk, Chunks, chunks
from .seam import DataSource, LearnerLike

__all__ = [
    "Chunk",
    "Chunks",
    "DataSource",
    "FollowingLoader",
    "IslandPlace",
    "LearnerLike",
    "Loader",
    "Shards",
    "chunks",
    "iterable",
    "loader",
    "place",
    "shards",
    "stream",
]
