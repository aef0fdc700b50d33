"""Chat prompts: ChatML by hand, and templates where jinja2 is installed."""

import datetime
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from jaxserve.model.random_llama import random_checkpoint
from jaxserve.text.chat import render_chat

SMOLLM2 = (
  "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
  "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
  "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
  "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
  "{% endif %}"
)
USER = {"role": "user", "content": "Hi <b>"}
SYSTEM = {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "Hello"}
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

HAS_JINJA = importlib.util.find_spec("jinja2") is not None
needs_jinja = pytest.mark.skipif(not HAS_JINJA, reason="not installed: jinja2")


@pytest.fixture(params=["by hand", pytest.param("jinja2", marks=needs_jinja)])
def renderer(request, monkeypatch):
  if request.param == "by hand":
    monkeypatch.setitem(sys.modules, "jinja2", None)


@pytest.mark.usefixtures("renderer")
class TestChatml:
  def test_the_default_system_message_of_the_template(self):
    assert render_chat(SMOLLM2, [USER]) == (
      f"<|im_start|>system\n{DEFAULT}<|im_end|>\n"
      "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )

  def test_a_conversation(self):
    assert render_chat(SMOLLM2, [SYSTEM, USER, REPLY, USER], add_generation_prompt=False) == (
      "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
      "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
    )

  def test_the_template_of_the_random_model_has_no_system_message(self):
    template = random_checkpoint().chat_template
    expected = "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(template, [USER]) == expected

  def test_a_message_without_text_is_refused(self):
    with pytest.raises(ValueError, match="message"):
      render_chat(SMOLLM2, [{"role": "user", "content": None}])


class TestWithoutJinja:
  @pytest.fixture(autouse=True)
  def absent(self, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)

  def test_another_template_names_the_extra(self):
    with pytest.raises(ValueError, match=r"pip install 'jaxserve\[serve\]'$"):
      render_chat("[INST] {{ messages }} [/INST]", [USER])

  def test_tools_take_the_real_template(self):
    with pytest.raises(ValueError, match="jinja2"):
      render_chat(SMOLLM2, [USER], tools=[{}])


def test_no_template():
  with pytest.raises(ValueError, match="no chat template"):
    render_chat(None, [USER])


@needs_jinja
class TestJinja:
  def render(self, template, **variables):
    return render_chat(template, [USER], **variables)

  def test_blocks_are_trimmed(self):
    assert self.render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}") == "x\n"

  def test_json_is_not_escaped_for_html(self):
    assert self.render("{{ tools | tojson }}", tools=["<é>"]) == '["<é>"]'

  def test_special_tokens_and_loop_controls(self):
    template = (
      "{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ bos_token }}{% endfor %}"
    )
    assert self.render(template, bos_token="<s>") == "<s>"

  def test_generation_marks_print_what_they_hold(self):
    assert self.render("{% generation %}x{% endgeneration %}") == "x"

  def test_the_date_is_an_argument(self):
    now = datetime.datetime(2026, 2, 3)
    assert self.render("{{ strftime_now('%d %b') }}", now=now) == "03 Feb"
    with pytest.raises(ValueError, match="date"):
      self.render("{{ strftime_now('%d') }}")

  @pytest.mark.parametrize(
    "template",
    [
      "{{ raise_exception('roles must alternate') }}",
      "{{ messages.append(1) }}",
      "{{ ''.__class__.__mro__ }}",
      "{% if %}",
      "{{ messages[0].content + 1 }}",
    ],
  )
  def test_a_template_that_fails_is_a_value_error(self, template):
    with pytest.raises(ValueError, match="the chat template"):
      self.render(template)


GOLDEN = Path(__file__).parents[1] / "golden" / "chats.json"


@needs_jinja
@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["template"])
def test_templates_render_as_transformers_renders_them(case):
  def render():
    return render_chat(
      case["source"], case["messages"], add_generation_prompt=case["generate"],
      bos_token="<s>", eos_token="</s>",
    )  # fmt: skip

  if case["text"] is not None:
    assert render() == case["text"]
    return
  with pytest.raises(ValueError, match="refuses these messages"):
    render()


ESCAPES = [
  "{{ ''.__class__.__mro__ }}",
  "{{ messages.__class__ }}",
  "{{ cycler.__init__.__globals__ }}",
  "{{ namespace.__init__.__globals__ }}",
  "{{ dict.__class__.__base__.__subclasses__() }}",
  "{{ dict.fromkeys.__func__ }}",
  "{{ raise_exception.__globals__ }}",
  "{{ (messages|attr('__class__')) }}",
  "{{ messages|map(attribute='__class__')|list }}",
  "{{ '{0.__class__.__mro__}'.format(messages) }}",
  "{{ self._TemplateReference__context }}",
  "{% set ns = namespace(__class__=1) %}{{ ns }}",
  "{% set ns = namespace() %}{% set ns.__dict__ = {} %}{{ ns }}",
  "{{ messages.append(1) }}",
  "{{ messages[0].update({'role': 'x'}) }}",
  "{% include '/etc/passwd' %}",
  "{% import 'os' as os %}{{ os }}",
  "{{ range(999999999)|list }}",
  "{{ lipsum.__globals__['os'].popen('id').read() }}",
]


@needs_jinja
@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_does_not_leave_the_sandbox(template):
  messages = [dict(USER)]
  try:
    text = render_chat(template, messages)
  except ValueError as error:
    assert "chat template" in str(error)
  else:  # what is refused silently is undefined, and prints as nothing
    assert text.strip() in ("", "[]", "[Undefined]")
  assert messages == [USER]


@needs_jinja
def test_a_namespace_and_a_dict_still_work():
  template = (
    "{% set ns = namespace(n=0, self=2) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ ns.self }}{{ dict(a=1)['a'] }}{{ dict.fromkeys(['k'], 3)['k'] }}"
  )
  assert render_chat(template, [USER, REPLY]) == "2213"
