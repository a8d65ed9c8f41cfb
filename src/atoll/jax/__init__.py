"""Atoll inside a JAX training loop. The machine, the codecs and the wire are those of every learner.

import atoll.jax
with atoll.jax.Learner(params, opt_state) as learner:
    params, opt_state = learner.params, learner.opt_state
    for batch in data:
        params, opt_state, loss = train_step(params, opt_state, batch)
        params = learner.step(params, opt_state, tokens=batch.size)
"""

from importlib.util import find_spec

import lazy_loader

from atoll.errors import ConfigError

if find_spec("jax") is None:
    raise ConfigError("atoll.jax needs JAX: pip install 'atoll[jax]'")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
