"""Chat templates in the manner of published ones, and the texts that transformers makes of them."""

from collections.abc import Mapping
from typing import Any

_LOOP = "{% for message in messages %}"
_GENERATE = "{% if add_generation_prompt %}"
TEMPLATES: Mapping[str, str] = {
  "header ids": (
    "{{ bos_token }}" + _LOOP + "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    + _GENERATE + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
  ),
  "chatml": (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    + _LOOP + "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}" + _GENERATE + "{{ '<|im_start|>assistant\n' }}{% endif %}"
  ),
  "inst": (
    "{{ bos_token }}" + _LOOP
    + "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant') }}{% endif %}{% endfor %}"
  ),
  "turns": (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('No system role') }}{% endif %}" + _LOOP
    + "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "<start_of_turn>{{ role }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    + _GENERATE + "<start_of_turn>model\n{% endif %}"
  ),
  "loop controls and json": (
    "{%- for message in messages -%}\n  {%- if message.role == 'system' -%}\n"
    "    {%- continue -%}\n  {%- endif -%}\n<|{{ message.role }}|>\n"
    "{{ message | tojson }}<|end|>\n{% endfor -%}\n" + _GENERATE + "<|assistant|>\n{% endif %}"
  ),
}  # fmt: skip
_USER = {"role": "user", "content": '  What is 2 < 3 & "x"? 漢字\n'}
MESSAGES: Mapping[str, list[dict[str, str]]] = {
  "one": [_USER],
  "system": [{"role": "system", "content": "Be brief."}, _USER],
  "several": [
    _USER,
    {"role": "assistant", "content": "True."},
    {"role": "user", "content": "Why?"},
  ],
  "twice the user": [_USER, _USER],
}


def _text(template: str, messages: list[dict[str, str]], generate: bool) -> str | None:
  """What transformers renders; None where the template refuses."""
  import jinja2
  from transformers.utils.chat_template_utils import render_jinja_template

  try:
    (text,), _ = render_jinja_template(
      conversations=[messages], chat_template=template, add_generation_prompt=generate,
      bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
  except jinja2.exceptions.TemplateError:
    return None
  return text


def rendered() -> list[dict[str, Any]]:
  """Every template on every conversation, with and without the start of a reply."""
  return [
    {
      "template": name, "source": source, "messages": messages, "generate": generate,
      "text": _text(source, messages, generate),
    }
    for name, source in TEMPLATES.items()
    for messages in MESSAGES.values()
    for generate in (False, True)
  ]  # fmt: skip
