"""Chat messages to one prompt text.

A checkpoint's Jinja template is rendered as transformers does it, in a sandbox, where jinja2 is
installed. Without it, templates that are ChatML are rendered by hand.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_CHATML_MARK = "<|im_start|>"
# "If the first message is not the system's, say this": SmolLM2 and Qwen2 have it.
_DEFAULT_SYSTEM = re.compile(r"""<\|im_start\|>system(?:\n|\\n)([^{}'"]*?)<\|im_end\|>""")
_INSTALL = "pip install 'jaxserve[serve]'"


def render_chat(
  template: str | None,
  messages: Sequence[Message],
  *,
  add_generation_prompt: bool = True,
  bos_token: str = "",
  eos_token: str = "",
  now: datetime.datetime | None = None,
  **variables: Any,
) -> str:
  """Renders a conversation as the model was trained to see it.

  Args:
    template: the checkpoint's chat template.
    messages: each with "role" and "content", in order.
    add_generation_prompt: end with the start of the assistant's reply.
    bos_token: text of the token that starts a text.
    eos_token: text of the token that ends one.
    now: what templates that print the date take for the date.
    **variables: more for the template: tools, documents, enable_thinking.

  Returns:
    The text; encode it with add_special_tokens=False.

  Raises:
    ValueError: if there is no template, it refuses these messages, or it takes jinja2 to render.
  """
  if not template:
    raise ValueError("this model has no chat template; use completions, or pass a template")
  try:
    import jinja2  # noqa: F401
  except ImportError:
    if _CHATML_MARK in template and not variables:
      return _render_chatml(template, messages, add_generation_prompt)
    raise ValueError(
      f"rendering this model's chat template takes jinja2; run: {_INSTALL}"
    ) from None
  variables |= {
    "messages": messages,
    "add_generation_prompt": add_generation_prompt,
    "bos_token": bos_token,
    "eos_token": eos_token,
  }
  return _render_jinja(template, variables, now)


def _render_chatml(template: str, messages: Sequence[Message], add_generation_prompt: bool) -> str:
  default = _default_system(template)
  if default is not None and (not messages or messages[0].get("role") != "system"):
    messages = [{"role": "system", "content": default}, *messages]
  parts = []
  for message in messages:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
      raise ValueError(f"a message needs a text as role and as content: {message!r}")
    parts.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
  return "".join(parts) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def _default_system(template: str) -> str | None:
  match = _DEFAULT_SYSTEM.search(template)
  return match[1] if match else None


def _render_jinja(
  template: str, variables: Mapping[str, Any], now: datetime.datetime | None
) -> str:
  import jinja2

  from jaxserve.text import sandbox

  environment = sandbox.environment(now)
  try:
    return environment.from_string(template).render(**variables)
  except jinja2.TemplateError as error:
    raise ValueError(f"the chat template refuses these messages: {error}") from None
  except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
    raise ValueError(f"the chat template cannot take these messages: {error}") from None
