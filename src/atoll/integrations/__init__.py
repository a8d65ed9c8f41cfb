"""Atoll under the loops that others have written. Each module needs its library: `pip install 'atoll[integrations]'`.

hf          Hugging Face Trainer
lightning   Lightning's Trainer
titan       torchtitan's trainer
"""
