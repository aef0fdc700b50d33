"""A tiny random Llama that reads bytes: always there, for demos, tests and benchmarks."""

from jaxserve.config import ModelConfig
from jaxserve.model.checkpoint import Checkpoint
from jaxserve.model.llama import random_params

# Tokens 0..255 are bytes, then come the special tokens of `jaxserve.text.tokenizer.ByteTokenizer`.
_VOCAB_SIZE = 259
_END_OF_MESSAGE = 257
_END_OF_TEXT = 258
_CHAT_TEMPLATE = (
  "{% for message in messages %}"
  "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

RANDOM_CONFIG = ModelConfig(
  vocab_size=_VOCAB_SIZE,
  hidden_size=64,
  intermediate_size=176,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
)


def random_checkpoint(config: ModelConfig = RANDOM_CONFIG, seed: int = 0) -> Checkpoint:
  """A random Llama with the byte tokenizer, in float32.

  Args:
    config: its shape.
    seed: of the weights.

  Returns:
    The checkpoint.
  """
  return Checkpoint(
    config=config,
    params=random_params(config, seed),
    tokenizer_json=None,
    chat_template=_CHAT_TEMPLATE,
    eos_token_ids=(_END_OF_MESSAGE, _END_OF_TEXT),
    bos_token_id=None,
    name="random",
    source=f"random weights, seed {seed}",
  )
