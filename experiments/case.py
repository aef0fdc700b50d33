"""Models and devices as the flags of an experiment name them."""

import dataclasses
import json
import math
import pathlib
import sys

from jaxserve import cost, cost_tables


def model(name, bytes_per_param=None, kv_bytes=2):
  """A model of the table by name, or counted from a config.json, of which name is the path."""
  path = pathlib.Path(name).expanduser()
  path = path / "config.json" if path.is_dir() else path
  if path.suffix != ".json" and not path.exists():
    found = cost_tables.find_model(name)
    width = found.bytes_per_param if bytes_per_param is None else bytes_per_param
    return dataclasses.replace(found, bytes_per_param=width, kv_bytes=kv_bytes)
  try:
    config = json.loads(path.read_text("utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"model={name!r}: cannot read {path}: {error}") from error
  if not isinstance(config, dict):
    raise ValueError(f"model={name!r}: {path} is not a config.json: an object is needed")
  return cost_tables.model_of_config(config, bytes_per_param, kv_bytes)


def device(name):
  """A device of the table, or `this`: the one in use, measured on the spot."""
  if name != "this":
    return cost_tables.find_device(name)
  import jax  # only here: the table needs no device

  from jaxserve.engine import defaults, hardware

  used = jax.devices()[0]
  return cost_tables.Device(
    hardware=hardware.measure(used, "bfloat16"),
    memory=defaults.memory_bytes(used),
    kinds=(used.device_kind,),
    achieved=f"{hardware.PRODUCT_SHARE:.0%} of a plain bfloat16 product and "
    f"{hardware.READ_SHARE:.0%} of a plain read, both measured now and shown in the place of a "
    "data sheet; the shares are those that experiments.engine_speed recorded",
  )


def profile(path):
  """A profile that experiments.calibrate wrote; None without a path."""
  if path is None:
    return None
  from jaxserve.engine import profiles  # only here, as above

  return profiles.load(path)


def profiled_device(found):
  """(model, device) of a profile, for the formulas of `jaxserve.cost`."""
  model_cost, hardware = found.as_hardware()
  return model_cost, cost_tables.Device(
    hardware=hardware, memory=math.inf, kinds=(found.device,),
    achieved="fitted to measured steps by experiments.calibrate",
  )  # fmt: skip


def profile_heading(found):
  """Two lines: what was measured, and its costs."""
  c = found.costs
  return (
    f"{found.model} in {found.dtype} on {found.device}, by measured costs: a step "
    f"{1e3 * c.step_s:.3g} ms, weights {1e3 * c.weights_s:.3g} ms,\na token {1e6 * c.token_s:.3g} "
    f"us, a pair {1e9 * c.pair_s:.3g} ns, a cached token {1e6 * c.kv_s:.3g} us, a decode "
    f"{1e6 * c.row_s:.3g} us, a row of the head {1e6 * c.head_row_s:.3g} us"
  )


def fits(model_cost, chosen, resident):
  """A warning if weights and KV exceed the device's memory, else ''."""
  weights = cost.weight_bytes(model_cost)
  kv = cost.kv_bytes_per_token(model_cost) * resident
  if weights + kv <= chosen.memory:
    return ""
  return (
    f"note: weights of {weights / 1e9:.1f} GB and KV of {kv / 1e9:.1f} GB do not fit the "
    f"{chosen.memory / 1e9:.0f} GB of one {chosen.hardware.name}; the figures are those of one "
    "device with enough memory"
  )


def heading(name, model_cost, chosen):
  """Two lines: the model and the device, with every figure that goes into the formulas."""
  hardware = chosen.hardware
  return (
    f"{name}: P {model_cost.num_params / 1e9:.3f}e9, L {model_cost.num_layers}, h "
    f"{model_cost.num_heads}, h_kv {model_cost.num_kv_heads}, d {model_cost.head_dim}, b "
    f"{model_cost.bytes_per_param:g}\n"
    f"{hardware.name}: pi {hardware.flops / 1e12:.4g} TFLOP/s of {hardware.spec_flops / 1e12:.4g}, "
    f"beta {hardware.bandwidth / 1e9:,.4g} GB/s of {hardware.spec_bandwidth / 1e9:,.4g} "
    f"({chosen.achieved})"
  )


def milliseconds(field, value):
  """A flag in milliseconds as seconds; ValueError unless it is positive."""
  if not 0 < value < math.inf:
    raise ValueError(f"{field}={value:g}: must be a positive number of milliseconds")
  return value / 1e3


def at_least(field, value, least):
  """The value of a flag; ValueError if it is below `least`."""
  if value < least:
    raise ValueError(f"{field}={value}: must be at least {least}")
  return value


def numbers(field, words, kind=int):
  """A list flag as rising numbers, each once; ValueError if a word is none."""
  try:
    return tuple(sorted({kind(word) for word in words}))
  except ValueError:
    what = "whole numbers" if kind is int else "numbers"
    raise ValueError(f"{field}={','.join(words)}: must be {what}, such as 512,1024") from None


def no_arguments(argv):
  """ValueError if words are left that are no flags."""
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}: everything is a --flag")


def flags_parser(name, values, mistake):
  """For `app.run`: flags that raise `mistake` end the experiment with one line and exit code 2."""

  def parse(argv):
    try:
      return values(argv)
    except mistake as error:
      print(f"experiments.{name}: {error}", file=sys.stderr)
      sys.exit(2)

  return parse
