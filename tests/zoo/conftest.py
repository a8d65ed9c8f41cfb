"""One thread for torch, as the launcher gives each learner: the suite shares its cores with other processes."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
