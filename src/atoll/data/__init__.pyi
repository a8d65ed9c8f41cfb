from .loaders import Loader, iterable, loader, stream
from .order import place
from .raw import Chunk, Chunks, chunks
from .seam import DataSource, LearnerLike

__all__ = ["Chunk", "Chunks", "DataSource", "LearnerLike", "Loader", "chunks", "iterable", "loader", "place", "stream"]
