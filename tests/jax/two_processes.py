"""Arrays that are cut over two processes are refused by name. python two_processes.py RANK PORT"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import atoll.jax
from atoll.errors import LayoutError

rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank, initialization_timeout=60)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
cut = NamedSharding(mesh, PartitionSpec("x"))
array = jax.make_array_from_callback((4, 4), cut, lambda index: np.zeros((4, 4), np.float32)[index])
try:
    atoll.jax.Learner({"weight": array}, address="127.0.0.1:1")
except LayoutError as error:
    print(error)
