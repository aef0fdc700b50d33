"""Which device runs what. The scheduler gets a CPU device of its own.

On the model's device a scheduling step would queue behind the running model step.
"""

import dataclasses

import jax

CPU_DEVICES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
  """The model's device, and the scheduler's."""

  model: jax.Device
  scheduler: jax.Device


def set_up() -> None:
  """Asks JAX for two CPU devices. Call it before anything starts a backend."""
  jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


def pick() -> Devices:
  """The default device for the model, and a CPU device that is not it for the scheduler.

  Raises:
    RuntimeError: the model runs on a CPU and there is no second CPU device.
  """
  model = jax.devices()[0]
  others = [d for d in jax.local_devices(backend="cpu") if d != model]
  if not others:
    raise RuntimeError(
      "the scheduler needs a CPU device of its own: call jaxserve.engine.devices.set_up() before "
      f'JAX starts, or jax.config.update("jax_num_cpu_devices", {CPU_DEVICES})'
    )
  return Devices(model=model, scheduler=others[0])
