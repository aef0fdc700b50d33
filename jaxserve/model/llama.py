"""Llama as a tree of parameters, and the pure function that runs its layers over a paged cache.

Parameters are [out, in] as in checkpoints, fused where the engine fuses: q, k, v in one matrix,
gate and up in one. `load` turns named arrays into (graphdef, leaves) once; a step merges them back
inside its trace, so the module costs nothing at run time.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.model import dots
from jaxserve.model.kv_cache import KVCache

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], kv) -> ([T, Hq, D], kv with k and v written).
Attend = Callable[
  [jax.Array | int, jax.Array, jax.Array, jax.Array, KVCache], tuple[jax.Array, KVCache]
]

# Rows that a sum over the last axis is done for at least; see `rms_norm`.
_FEWEST_ROWS = 8

NORMS = ("input_norm", "post_norm", "norm")


class Layer(nnx.Module):
  """Parameters of one decoder layer; shapes in `param_shapes`."""

  def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: jnp.dtype) -> None:
    for name, shape in shapes.items():
      setattr(self, name, _param(name, shape, dtype))


class Llama(nnx.Module):
  """Parameters of the model; matrices in `dtype`, norm gains in float32."""

  embed: nnx.Param
  norm: nnx.Param
  lm_head: nnx.Param  # Only where the embedding is not tied.

  def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
    layers: list[dict[str, tuple[int, ...]]] = [{} for _ in range(config.num_layers)]
    for name, shape in param_shapes(config).items():
      if name.startswith("layers."):
        _, index, leaf = name.split(".")
        layers[int(index)][leaf] = shape
      else:
        setattr(self, name, _param(name, shape, dtype))
    self.layers = nnx.List([Layer(shapes, dtype) for shapes in layers])

  @property
  def head(self) -> jax.Array:
    """[V, Dm]: the output projection, which is the embedding where they are tied."""
    return self.lm_head[...] if hasattr(self, "lm_head") else self.embed[...]

  def per_layer(self, name: str) -> list[jax.Array]:
    """The parameter `name` of every layer."""
    return [getattr(layer, name)[...] for layer in self.layers]


def _param(name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param:
  return nnx.Param(jnp.zeros(shape, jnp.float32 if name in NORMS else dtype))


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Shape of every parameter by name: `embed`, `layers.0.qkv`, ..., `norm`, `lm_head` if untied."""
  width, heads = config.hidden_size, config.num_heads * config.head_dim
  kv_heads = config.num_kv_heads * config.head_dim
  layer = {
    "input_norm": (width,),
    "qkv": (heads + 2 * kv_heads, width),
    "o": (width, heads),
    "post_norm": (width,),
    "gate_up": (2 * config.intermediate_size, width),
    "down": (width, config.intermediate_size),
  }
  shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, width)}
  for i in range(config.num_layers):
    shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
  shapes["norm"] = (width,)
  if not config.tie_word_embeddings:
    shapes["lm_head"] = (config.vocab_size, width)
  return shapes


def random_params(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
  """Random float32 parameters under which activations keep a scale of about one.

  Matrices are normal with variance 1/in, those that write to the residual stream divided by
  sqrt(2 L) more; gains are near one.
  """
  rng = np.random.default_rng(seed)
  params = {}
  for name, shape in param_shapes(config).items():
    values = rng.standard_normal(shape, dtype=np.float32)
    leaf = name.rsplit(".", 1)[-1]
    if leaf in NORMS:
      params[name] = 1 + 0.1 * values
    else:
      depth = 2 * config.num_layers if leaf in ("o", "down") else 1
      params[name] = values * np.float32(1 / math.sqrt(shape[1] * depth))
  return params


def load(
  config: ModelConfig, params: Mapping[str, np.ndarray | jax.Array], dtype: jnp.dtype
) -> tuple[nnx.GraphDef, tuple[jax.Array, ...]]:
  """Puts named arrays on the default device and flattens them for the compiled step.

  Args:
    config: the model.
    params: an array for every name of `param_shapes(config)`, of that shape, of a float dtype.
    dtype: of the matrices; norm gains stay float32.

  Returns:
    (graphdef, leaves): static structure and flat arrays; `merge` is the inverse.

  Raises:
    ValueError: naming the tensor that is missing, unknown, or of the wrong shape or dtype.
  """
  graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype)))
  targets = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
  unknown = sorted(set(params) - set(targets))
  if unknown:
    raise ValueError(f"tensor {unknown[0]!r} is no parameter of this model ({len(unknown)} such)")
  return graphdef, tuple(_placed(name, params, target) for name, target in targets.items())


def _placed(
  name: str, params: Mapping[str, np.ndarray | jax.Array], target: jax.ShapeDtypeStruct
) -> jax.Array:
  if name not in params:
    raise ValueError(f"tensor {name!r} is missing; expected shape {target.shape}")
  value = params[name]
  if tuple(value.shape) != target.shape:
    raise ValueError(f"tensor {name!r} has shape {tuple(value.shape)}, expected {target.shape}")
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise ValueError(f"tensor {name!r} has dtype {value.dtype}, expected a float dtype")
  return jnp.asarray(value, target.dtype)


def merge(graphdef: nnx.GraphDef, leaves: tuple[jax.Array, ...]) -> Llama:
  """The module again, from what `load` returned; for use inside a trace."""
  return nnx.merge(graphdef, list(leaves))


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
  """f32[D / 2], radians per position of every pair of channels.

  Source: RoPE (Su et al. 2021); Llama 3.1's `rope_scaling`: wavelengths above
  original / low_freq_factor are stretched by `factor`, those below original / high_freq_factor are
  kept, and in between the two are blended linearly in original / wavelength.
  """
  plain = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if rope.kind == "default":
    return plain.astype(np.float32)
  turns = rope.original_max_position * plain / (2 * math.pi)
  low, high = rope.low_freq_factor, rope.high_freq_factor
  keep = np.clip((turns - low) / (high - low), 0, 1)
  return (plain * (keep + (1 - keep) / rope.factor)).astype(np.float32)


def rope_table(positions: jax.Array, rope: RopeConfig, head_dim: int) -> jax.Array:
  """f32[2, T, 1, D / 2]: cosines and sines of every token's phases, computed in float32."""
  frequencies = jnp.asarray(rope_frequencies(rope, head_dim))
  phases = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None]
  return jnp.stack([jnp.cos(phases), jnp.sin(phases)])


def apply_rope(x: jax.Array, table: jax.Array) -> jax.Array:
  """Rotates x [T, H, D]; channel i is paired with i + D / 2, as in checkpoints of the HF layout."""
  left, right = jnp.split(x, 2, axis=-1)
  cos, sin = table[0], table[1]
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean(x**2) + eps) * gain over the last axis of x [T, Dm], in float32.

  A row's result does not depend on how many others there are, bit by bit: XLA:CPU sums fewer than
  8 rows in another order than more, and its reciprocal square root depends on the vector length,
  while root and quotient are exactly rounded.
  """
  padded = jnp.concatenate([x, jnp.zeros((max(_FEWEST_ROWS - x.shape[0], 0), x.shape[1]))])
  mean = jnp.mean(jnp.square(jax.lax.optimization_barrier(padded)), axis=-1, keepdims=True)
  root = jax.lax.optimization_barrier(jnp.sqrt(mean + eps))[: x.shape[0]]
  return x / root * gain[None]


def run_layers(
  model: Llama,
  config: ModelConfig,
  x: jax.Array,
  positions: jax.Array,
  kv: KVCache,
  attend: Attend,
  *,
  unroll: bool,
) -> tuple[jax.Array, KVCache]:
  """Runs all layers.

  Args:
    model: parameters.
    config: the model.
    x: f32[T, Dm], embedded tokens.
    positions: i32[T].
    kv: cache, passed through `attend`.
    attend: writes the new keys and values and attends; see `Attend`.
    unroll: one copy of the layer per layer, instead of a loop with a switch per product. The loop
      is as fast on XLA:CPU and its size does not grow with L; on a GPU a switch would have the host
      wait for its index.

  Returns:
    (f32[T, Dm] residual stream, not yet normalised; the updated cache).
  """
  names = ("qkv", "o", "gate_up", "down")
  weights = {name: model.per_layer(name) for name in names}
  norms = {name: jnp.stack(model.per_layer(name)) for name in ("input_norm", "post_norm")}
  table = rope_table(positions, config.rope, config.head_dim)

  def layer(i: jax.Array | int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
    x, kv = carry
    h = rms_norm(x, norms["input_norm"][i], config.rms_norm_eps)
    q, k, v = _split_heads(dots.layer_linear(h, weights["qkv"], i), config)
    out, kv = attend(i, apply_rope(q, table), apply_rope(k, table), v, kv)
    x = x + dots.layer_linear(out.reshape(x.shape[0], -1), weights["o"], i)
    h = rms_norm(x, norms["post_norm"][i], config.rms_norm_eps)
    gate, up = jnp.split(dots.layer_linear(h, weights["gate_up"], i), 2, axis=1)
    return x + dots.layer_linear(jax.nn.silu(gate) * up, weights["down"], i), kv

  carry = (x, kv)
  if not unroll:
    return jax.lax.fori_loop(0, config.num_layers, layer, carry)
  for i in range(config.num_layers):
    carry = layer(i, carry)
  return carry


def _split_heads(qkv: jax.Array, config: ModelConfig) -> Iterator[jax.Array]:
  """[T, Hq, D], [T, Hkv, D], [T, Hkv, D] of the fused projection [T, (Hq + 2 Hkv) D]."""
  heads = qkv.reshape(qkv.shape[0], -1, config.head_dim)
  ends = (config.num_heads, config.num_heads + config.num_kv_heads)
  return iter(jnp.split(heads, ends, axis=1))
