"""Llama as a tree of parameters, and the pure function that runs its layers over a paged cache.

Parameters are [out, in] as in checkpoints, fused where the engine fuses: q, k, v in one matrix,
gate and up in one. `load` turns named arrays into (graphdef, leaves) once; a step merges them back
inside its trace, so the module costs nothing at run time.
"""

import collections
import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config import MATRICES, Activation, ModelConfig, RopeConfig
from jaxserve.model import dots
from jaxserve.model import quantize as quantize_lib
from jaxserve.model.kv_cache import KVCache
from jaxserve.model.quantize import QUANTIZATIONS, QUANTIZERS, Int4, Int8, Quantize, Weight
from jaxserve.progress import progress

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], kv, window) ->
# ([T, Hq, D], kv with k and v written). The window is static.
Attend = Callable[
  [jax.Array | int, jax.Array, jax.Array, jax.Array, KVCache, int | None],
  tuple[jax.Array, KVCache],
]

_ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
# Threads that read parameters: two keep a disk busy, the others convert.
_LOADERS = 4
# Rows that a sum over the last axis is done for at least; see `rms_norm`.
_FEWEST_ROWS = 8

NORMS = ("input_norm", "post_norm", "q_norm", "k_norm", "norm")
BIASES = tuple(f"{name}_bias" for name in MATRICES)
FLOAT32 = frozenset((*NORMS, *BIASES))


class Quantized(nnx.Module):
  """A matrix in few bits: the fields of `quantize.Int8` or `quantize.Int4`."""

  values: nnx.Param
  scale: nnx.Param
  low: nnx.Param  # Only of 4 bits.

  def __init__(self, shape: tuple[int, int], kind: Quantize) -> None:
    for name, part in quantize_lib.part_shapes(kind, shape).items():
      setattr(self, name, nnx.Param(jnp.zeros(part.shape, part.dtype)))


class Layer(nnx.Module):
  """Parameters of one decoder layer; shapes in `param_shapes`."""

  def __init__(
    self, shapes: Mapping[str, tuple[int, ...]], dtype: jnp.dtype, kind: Quantize
  ) -> None:
    for name, shape in shapes.items():
      setattr(self, name, _param(name, shape, dtype, kind))


class Llama(nnx.Module):
  """Parameters of the model; matrices in `dtype` or quantized, gains and biases in float32."""

  embed: nnx.Param
  norm: nnx.Param
  lm_head: nnx.Param  # Only where the embedding is not tied.

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, kind: Quantize = "none") -> None:
    layers: list[dict[str, tuple[int, ...]]] = [{} for _ in range(config.num_layers)]
    for name, shape in param_shapes(config).items():
      if name.startswith("layers."):
        _, index, leaf = name.split(".")
        layers[int(index)][leaf] = shape
      else:
        setattr(self, name, _param(name, shape, dtype, kind))
    self.layers = nnx.List([Layer(shapes, dtype, kind) for shapes in layers])

  @property
  def head(self) -> Weight:
    """[V, Dm]: the output projection, which is the embedding where they are tied."""
    return _weight(self.lm_head) if hasattr(self, "lm_head") else self.embed[...]

  def per_layer(self, name: str) -> list[Weight]:
    """The matrix `name` of every layer."""
    return [_weight(getattr(layer, name)) for layer in self.layers]

  def stacked(self, name: str) -> jax.Array:
    """[L, ...]: the gain or bias `name` of every layer."""
    return jnp.stack([getattr(layer, name)[...] for layer in self.layers])


def _weight(param: nnx.Param | Quantized) -> Weight:
  """What `dots` multiplies with."""
  if not isinstance(param, Quantized):
    return param[...]
  values, scale = param.values[...], param.scale[...]
  if not hasattr(param, "low"):
    return Int8(values=values, scale=scale)
  return Int4(values=values, scale=scale, low=param.low[...])


def _kind_of(name: str, kind: Quantize) -> Quantize:
  """How the parameter `name` is stored: a head of 4 bits would cost more than it saves."""
  if name == "lm_head" and kind == "int4":
    return "int8"
  return kind if name in (*MATRICES, "lm_head") else "none"


def _param(
  name: str, shape: tuple[int, ...], dtype: jnp.dtype, kind: Quantize
) -> nnx.Param | Quantized:
  kind = _kind_of(name, kind)
  if kind != "none":
    return Quantized((shape[0], shape[1]), kind)
  return nnx.Param(jnp.zeros(shape, jnp.float32 if name in FLOAT32 else dtype))


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
  layer |= {f"{name}_bias": layer[name][:1] for name in config.biases}
  if config.qk_norm:
    layer |= dict.fromkeys(("q_norm", "k_norm"), (config.head_dim,))
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
  sqrt(2 L) more; gains are near one, biases near zero.
  """
  rng = np.random.default_rng(seed)
  params = {}
  for name, shape in param_shapes(config).items():
    values = rng.standard_normal(shape, dtype=np.float32)
    leaf = name.rsplit(".", 1)[-1]
    if leaf in NORMS:
      params[name] = 1 + 0.1 * values
    elif leaf in BIASES:
      params[name] = 0.3 * values
    else:
      depth = 2 * config.num_layers if leaf in ("o", "down") else 1
      params[name] = values * np.float32(1 / math.sqrt(shape[1] * depth))
  return params


def abstract(
  config: ModelConfig, dtype: jnp.dtype, quantize: Quantize = "none"
) -> tuple[nnx.GraphDef, tuple[jax.ShapeDtypeStruct, ...]]:
  """What `load` returns, with the shapes of the leaves in their place."""
  graphdef, targets = _targets(config, dtype, quantize)
  return graphdef, tuple(targets.values())


def _targets(
  config: ModelConfig, dtype: jnp.dtype, quantize: Quantize
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
  """Structure and, by name, in order, the leaves of the compiled step."""
  graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype, quantize)))
  return graphdef, {
    ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)
  }


def load(
  config: ModelConfig,
  params: Mapping[str, np.ndarray | jax.Array],
  dtype: jnp.dtype,
  quantize: Quantize = "none",
) -> tuple[nnx.GraphDef, tuple[jax.Array, ...]]:
  """Puts named arrays on the default device and flattens them for the compiled step.

  Args:
    config: the model.
    params: an array for every name of `param_shapes(config)`, of that shape, of a float dtype.
    dtype: of the matrices; gains and biases stay float32.
    quantize: "int8" or "int4" to store the matrices, not the embedding, in so many bits.

  Returns:
    (graphdef, leaves): static structure and flat arrays; `merge` is the inverse.

  Raises:
    ValueError: naming the tensor that is missing, unknown, or of the wrong shape or dtype.
  """
  if quantize not in QUANTIZATIONS:
    raise ValueError(f"quantize={quantize!r}: use one of {', '.join(QUANTIZATIONS)}")
  graphdef, targets = _targets(config, dtype, quantize)
  shapes = param_shapes(config)
  unknown = sorted(set(params) - set(shapes))
  if unknown:
    raise ValueError(f"tensor {unknown[0]!r} is no parameter of this model ({len(unknown)} such)")

  def read(name: str) -> dict[str, np.ndarray | jax.Array]:
    value = _checked(name, params, shapes[name])
    kind = _kind_of(name.rsplit(".", 1)[-1], quantize)
    if kind != "none":
      parts = QUANTIZERS[kind](np.asarray(value))
      return {f"{name}.{part}": array for part, array in parts.items()}
    is_host = isinstance(value, np.ndarray)
    return {name: value.astype(targets[name].dtype, copy=False) if is_host else value}

  placed = _placed(shapes, read, targets)
  return graphdef, tuple(placed[name] for name in targets)


def _placed(
  names: Iterable[str],
  read: Callable[[str], dict[str, np.ndarray | jax.Array]],
  targets: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
  """The arrays on the device. Threads read a few ahead: only those are in memory twice."""
  pool = concurrent.futures.ThreadPoolExecutor(_LOADERS)
  total = sum(math.prod(t.shape) * t.dtype.itemsize for t in targets.values())
  ahead: collections.deque[concurrent.futures.Future] = collections.deque()
  placed: dict[str, jax.Array] = {}
  try:
    with progress(total, "B", "Weights") as bar:

      def take() -> None:
        for name, array in ahead.popleft().result().items():
          placed[name] = jnp.asarray(array, targets[name].dtype)
          bar.advance(placed[name].size * placed[name].dtype.itemsize)

      for name in names:
        ahead.append(pool.submit(read, name))
        if len(ahead) > _LOADERS:
          take()
      while ahead:
        take()
  finally:
    pool.shutdown(cancel_futures=True)
  return placed


def _checked(
  name: str, params: Mapping[str, np.ndarray | jax.Array], shape: tuple[int, ...]
) -> np.ndarray | jax.Array:
  if name not in params:
    raise ValueError(f"tensor {name!r} is missing; expected shape {shape}")
  value = params[name]
  if tuple(value.shape) != shape:
    raise ValueError(f"tensor {name!r} has shape {tuple(value.shape)}, expected {shape}")
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise ValueError(f"tensor {name!r} has dtype {value.dtype}, expected a float dtype")
  return value


def merge(graphdef: nnx.GraphDef, leaves: tuple[jax.Array, ...]) -> Llama:
  """The module again, from what `load` returned; for use inside a trace."""
  return nnx.merge(graphdef, list(leaves))


def rope_frequencies(rope: RopeConfig, head_dim: int, longest: int = 0) -> np.ndarray:
  """f32[D / 2], radians per position of every pair of channels.

  Source: RoPE (Su et al. 2021); Llama 3.1's `rope_scaling`: wavelengths above
  original / low_freq_factor are stretched by `factor`, those below original / high_freq_factor are
  kept, and in between the two are blended linearly in original / wavelength. YaRN (Peng et al.
  2023) blends linearly in the channel; LongRoPE (Ding et al. 2024) has a factor for each.

  Args:
    rope: the embedding.
    head_dim: D.
    longest: tokens of the longest context served; only "longrope" asks.
  """
  plain = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  return (plain / _stretch(rope, plain, head_dim, longest)).astype(np.float32)


def _stretch(rope: RopeConfig, plain: np.ndarray, head_dim: int, longest: int) -> np.ndarray:
  """f64[D / 2], what the plain frequencies are divided by."""
  if rope.kind == "longrope":
    is_long = longest > rope.original_max_position
    return np.asarray(rope.long_factor if is_long else rope.short_factor, np.float64)
  if rope.kind == "linear":
    return np.full_like(plain, rope.factor)
  if rope.kind == "llama3":
    turns = rope.original_max_position * plain / (2 * math.pi)
    keep: np.ndarray = (turns - rope.low_freq_factor) / (
      rope.high_freq_factor - rope.low_freq_factor
    )
  elif rope.kind == "yarn":
    first, last = _yarn_ramp(rope, head_dim)
    keep = 1 - (np.arange(head_dim // 2) - first) / (last - first)
  else:
    return np.ones_like(plain)
  keep = np.clip(keep, 0, 1)
  return 1 / (keep + (1 - keep) / rope.factor)


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
  """Channels up to the first are kept, from the last on they are divided."""

  def channel(turns: float) -> float:
    """The channel, a real number, that turns so often over the original context."""
    length = rope.original_max_position / (turns * 2 * math.pi)
    return head_dim * math.log(length) / (2 * math.log(rope.theta))

  first, last = channel(rope.beta_fast), channel(rope.beta_slow)
  if rope.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, head_dim - 1)
  return first, last + 0.001 if first == last else last


def rope_table(
  positions: jax.Array, rope: RopeConfig, head_dim: int, longest: int = 0
) -> jax.Array:
  """f32[2, T, 1, D / 2]: cosines and sines of every token's phases, computed in float32."""
  frequencies = jnp.asarray(rope_frequencies(rope, head_dim, longest))
  phases = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None]
  table = jnp.stack([jnp.cos(phases), jnp.sin(phases)])
  return table if rope.attention_scale == 1 else table * np.float32(rope.attention_scale)


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
  weights = {name: model.per_layer(name) for name in MATRICES}
  vectors = {name: model.stacked(name) for name in _layer_vectors(config)}
  table = rope_table(positions, config.rope, config.head_dim, config.max_position)

  def project(
    name: str, x: jax.Array, i: jax.Array | int, axis: int = 1, out_axis: int = 1
  ) -> jax.Array:
    out = dots.layer_linear(x, weights[name], i, axis=axis, out_axis=out_axis)
    if name not in config.biases:
      return out
    return out + jnp.expand_dims(vectors[f"{name}_bias"][i], 1 - out_axis)

  def layer(
    i: jax.Array | int, carry: tuple[jax.Array, KVCache], window: int | None
  ) -> tuple[jax.Array, KVCache]:
    x, kv = carry
    h = rms_norm(x, vectors["input_norm"][i], config.rms_norm_eps)
    q, k, v = _split_heads(project("qkv", h, i), config)
    if config.qk_norm:
      q = _norm_heads(q, vectors["q_norm"][i], config.rms_norm_eps)
      k = _norm_heads(k, vectors["k_norm"][i], config.rms_norm_eps)
    out, kv = attend(i, apply_rope(q, table), apply_rope(k, table), v, kv, window)
    x = x + project("o", out.reshape(x.shape[0], -1), i)
    h = rms_norm(x, vectors["post_norm"][i], config.rms_norm_eps)
    axis = dots.feature_axis(h.shape[0], weights["gate_up"][0])
    gate, up = jnp.split(project("gate_up", h, i, out_axis=axis), 2, axis=axis)
    return x + project("down", _ACTIVATIONS[config.activation](gate) * up, i, axis=axis), kv

  carry = (x, kv)
  # The window is static, so layers that differ in it cannot share the body of a loop.
  if not unroll and not config.mixes_windows:
    body = functools.partial(layer, window=config.window(0))
    return jax.lax.fori_loop(0, config.num_layers, body, carry)
  for i in range(config.num_layers):
    carry = layer(i, carry, config.window(i))
  return carry


def _layer_vectors(config: ModelConfig) -> tuple[str, ...]:
  """Names of what a layer has besides its matrices."""
  biases = tuple(f"{name}_bias" for name in config.biases)
  heads = ("q_norm", "k_norm") if config.qk_norm else ()
  return ("input_norm", "post_norm", *heads, *biases)


def _norm_heads(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
  """RMSNorm of every head of x [T, H, D]."""
  return rms_norm(x.reshape(-1, x.shape[-1]), gain, eps).reshape(x.shape)


def _split_heads(qkv: jax.Array, config: ModelConfig) -> Iterator[jax.Array]:
  """[T, Hq, D], [T, Hkv, D], [T, Hkv, D] of the fused projection [T, (Hq + 2 Hkv) D]."""
  heads = qkv.reshape(qkv.shape[0], -1, config.head_dim)
  ends = (config.num_heads, config.num_heads + config.num_kv_heads)
  return iter(jnp.split(heads, ends, axis=1))
