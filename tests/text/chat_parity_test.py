"""Templates rendered as transformers renders them, where it is installed (extra: parity)."""

import datetime

import pytest

from jaxserve.text.chat import render_chat

utils = pytest.importorskip("transformers.utils.chat_template_utils")
pytest.importorskip("jinja2")

TEMPLATES = {
  "chatml": (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
  ),
  "llama": """
    {%- if messages[0]['role'] == 'system' %}
        {%- set system = messages[0]['content'] | trim %}
        {%- set loop_messages = messages[1:] %}
    {%- else %}
        {%- set system = false %}
        {%- set loop_messages = messages %}
    {%- endif %}
    {{- bos_token }}
    {%- for message in loop_messages %}
        {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- if loop.first and system %}{{- '<<SYS>>' + system + '<</SYS>>' }}{%- endif %}
        {{- '[INST] ' + message['content'].strip() + ' [/INST]' if message['role'] == 'user'
            else ' ' + message['content'] + eos_token }}
    {%- endfor %}
  """,
  "tools": """{%- if tools %}
<tools>{%- for tool in tools %}
{{ tool | tojson }}{%- endfor %}
</tools>
{{ tools | tojson(indent=2) }}
{%- endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content | tojson }}{{ m.get('name', '-') }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>
{%- endfor %}{% endif %}
{%- endfor %}""",
  "namespace": (
    "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.found = true %}{% set ns.n = ns.n + 1 %}{% continue %}{% endif %}[{{ m.content }}]"
    "{% if ns.n > 1 %}{% break %}{% endif %}{% endfor %}{{ ns.found }}{{ ns.n }}{{ dict(a=ns.n) }}"
  ),
  "generation": (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
  ),
  "date": "{{ strftime_now('%Y') | length }}{{ messages | length }}{{ messages[-1].content[:3] }}",
}
USER = {"role": "user", "content": " Grüß <b>dich</b> & 'x' "}
REPLY = {"role": "assistant", "content": "Hallo ☺"}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}]
CONVERSATIONS = {
  "user": [USER],
  "system": [{"role": "system", "content": " Be brief. "}, USER],
  "long": [USER, REPLY, USER, REPLY],
  "calls": [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<&>", "parameters": {}}}]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(template, conversation):
  template, messages = TEMPLATES[template], CONVERSATIONS[conversation]
  special = {"bos_token": "<s>", "eos_token": "</s>"}
  for tools in (None, TOOLS):
    (expected,), _ = utils.render_jinja_template(
      [messages], chat_template=template, tools=tools, add_generation_prompt=True, **special
    )
    extra = {"tools": tools} if tools else {}
    now = datetime.datetime.now()
    assert render_chat(template, messages, now=now, **special, **extra) == expected
