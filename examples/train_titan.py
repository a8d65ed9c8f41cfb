"""torchtitan's trainer with Atoll: its own entry point, with Atoll's class in the place of its own.

atoll run --learners 2 -- torchrun --nproc-per-node 1 examples/train_titan.py --job.config_file examples/titan.toml
"""

from torchtitan.train import main

from atoll.integrations.titan import AtollTrainer  # Atoll, line 1

if __name__ == "__main__":
    main(AtollTrainer)  # Atoll, line 2
