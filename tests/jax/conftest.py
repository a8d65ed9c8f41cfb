"""Four devices in one process, so that arrays can be cut over them."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
