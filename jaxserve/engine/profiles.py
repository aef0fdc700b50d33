"""Profiles as files: JSON that people can read. See `jaxserve.cost_profile`."""

import json
import pathlib
from typing import Any

from jaxserve import cost_profile
from jaxserve.config import ModelConfig
from jaxserve.cost_profile import Profile


def save(path: pathlib.Path, profile: Profile, **also: Any) -> None:
  """Writes a profile, with more for its readers; folders are made."""
  path.parent.mkdir(parents=True, exist_ok=True)
  document = cost_profile.to_document(profile, **also)
  path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def load(path: str | pathlib.Path) -> Profile:
  """Reads a profile.

  Raises:
    ValueError: the file cannot be read or is no profile; the message names the file and the field.
  """
  path = pathlib.Path(path).expanduser()
  try:
    return cost_profile.from_document(json.loads(path.read_text("utf-8")))
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"profile={path}: cannot be read ({error})") from None
  except json.JSONDecodeError as error:
    raise ValueError(
      f"profile={path}: is not JSON ({error.msg}, line {error.lineno}); give a file that "
      "experiments.calibrate wrote"
    ) from None
  except ValueError as error:
    raise ValueError(f"profile={path}: {error}") from None


def check_model(profile: Profile, model: ModelConfig, dtype: str) -> None:
  """Refuses a profile of another model or dtype: none of its costs would hold.

  Raises:
    ValueError: naming both.
  """
  if (profile.num_params, profile.dtype) != (model.num_params, dtype):
    raise ValueError(
      f"profile: was measured with {profile.model}, {profile.num_params:,} parameters in "
      f"{profile.dtype}; this model has {model.num_params:,} in {dtype}: run `python -m "
      "experiments.calibrate` for it, or leave --profile out"
    )
