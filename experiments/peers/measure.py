"""All engines on all cases, in turn: one computes at a time, and every round has its ratios.

In a round a case runs on one engine after the other, ours in the middle of the peers, whose order
changes from round to round, so that what else the machine does hits all alike.
"""

import pathlib
import shutil
import time

from absl import logging

from experiments.peers import figures, install, limits, models, worker
from experiments.peers.config import CASES, DEFAULT_MODEL, OURS, OUTPUTS, PEERS, US
from jaxserve.model.hf_directory import read_hf_directory
from jaxserve.text.tokenizer import load_tokenizer

_TEXTS = (
  "The capital of France is",
  "A steam engine turns heat into motion by",
  "Once upon a time there was a clockmaker who",
  "The three largest rivers of Europe are",
)
_AGREED = 24  # outputs of every prompt whose tokens are compared
_WARM_UP = (("prefill_512", 1), ("prefill_4096", 1), ("decode_4", 6), ("decode_16", 6))


def order(peers, number):
  """Engines of a round: ours in the middle, the peers turned round by round."""
  turn = number // 2 % max(len(peers), 1)
  turned = [*peers[turn:], *peers[:turn]]
  turned = turned[::-1] if number % 2 else turned
  middle = len(turned) // 2
  return [*turned[:middle], US, *turned[middle:]]


def prepared(config):
  """({peer: folder of its environment}, {peer: why it is left out})."""
  folders, skipped, given = {}, {}, dict(config.venvs)
  for name in config.peers:
    try:
      folders[name] = install.prepare(PEERS[name], config.peers_dir, given.get(name))
    except install.Unavailable as error:
      skipped[name] = str(error)
      logging.warning("Left out: %s, %s", PEERS[name].title, error)
  return folders, skipped


def run(config, kept, cache_dir, logs):
  """(rows, {peer: why it is left out}); measures what is not kept.

  Args:
    config: a `config.Config`.
    kept: a `kept.Kept`.
    cache_dir: of jaxserve, where the default model may be.
    logs: folder of what the workers print.
  """
  folders, skipped = prepared(config)
  rows = []
  for name in config.models:
    hf = models.prepare(name, config.peers_dir, cache_dir)
    session = Session(config, kept, logs, name, hf, folders)
    try:
      rows += session.run()
    finally:
      session.close()
    skipped |= {f"{peer} on {name}": why for peer, why in session.skipped.items()}
  return rows, skipped


class Session:
  """One model on all engines.

  Attributes:
    skipped: why peers that are installed were left out.
  """

  def __init__(self, config, kept, logs, model, hf, folders):
    self._config, self._kept, self._model = config, kept, model
    self._logs = pathlib.Path(logs).resolve()
    self._caches = pathlib.Path(config.peers_dir).expanduser().resolve() / "caches"
    self._checkpoint = read_hf_directory(hf, None)
    self._vocab_size = self._checkpoint.config.vocab_size
    self._folders, self._workers, self._loaded = {US: None, **folders}, {}, {}
    self._directories, self.skipped = {US: hf}, {}
    for name, folder in folders.items():
      try:
        self._directories[name] = models.convert(PEERS[name].format, hf, folder)
      except install.Unavailable as error:
        self._leave_out(name, error)

  def run(self):
    """Rows of all that was asked for; only what is not kept is measured."""
    cases, rows = [CASES[name] for name in self._config.cases], []
    starts = [case for case in cases if case.kind == "start" and self._model == DEFAULT_MODEL]
    for case in starts:
      rows.append(self._kept_or("start", 0, lambda _, case=case: self._start_up(case)))
    cases = [case for case in cases if case.kind != "start"]
    if cases:
      rows.append(self._kept_or("agreement", 0, self._agreement))
    for number in range(self._config.rounds):
      for case in cases:
        rows.append(self._kept_or(case.name, number, lambda i, case=case: self._timed(case, i)))
    if cases:
      rows.append(self._kept_or("memory", 0, self._memory))
    return rows

  def close(self):
    for each in self._workers.values():
      each.close()

  def _kept_or(self, case, number, measure):
    engines = [name for name in self._directories if name not in self.skipped]
    if row := self._kept.find(self._model, case, number, engines):
      for name in set(engines) & row["left_out"].keys():
        self._leave_out(name, row["left_out"][name])
      return row
    values = measure(number)
    logging.info("%s, %s, round %d: %s", self._model, case, number + 1, brief(values))
    versions = {name: loaded["versions"] for name, loaded in self._loaded.items()}
    return self._kept.add(self._model, case, number, values, versions, dict(self.skipped))

  def _leave_out(self, name, why):
    if name == US:
      raise why
    self.skipped[name] = str(why)
    self._directories.pop(name, None)
    logging.warning("Left out on %s: %s, %s", self._model, PEERS[name].title, why)

  def _engines(self, number):
    """Names in the order of a round, their workers started and warm."""
    missing = [name for name in self._directories if name not in self._workers]
    for name in missing:
      logging.info("Loading %s on %s", name, self._model)
      try:
        self._workers[name] = self._spawn(name, "session")
        self._loaded[name] = self._load(self._workers[name], name, "session", warm_up=True)
        self._warm_up(self._workers[name])
      except worker.WorkerError as error:
        self._workers.pop(name).close(at_once=True)
        self._leave_out(name, error)
    return order([name for name in self._config.peers if name in self._workers], number)

  def _spawn(self, name, kind):
    peer = OURS if name == US else PEERS[name]
    cache = self._caches / name / kind
    log = self._logs / f"{self._model}_{name}.log"
    return worker.start(peer, self._folders[name], log, cache, self._config.timeout_s)

  def _load(self, process, name, kind, **options):
    cache = {"compile_cache": str(self._caches / name / kind)}
    options = self._config.engine_options | cache | options
    return process.ask("load", model=str(self._directories[name]), options=options)

  def _warm_up(self, process):
    for name, tokens in _WARM_UP:
      for chunk in (512, None) if name.startswith("prefill") else (512,):
        sent = self._requests(CASES[name], seed=0)
        process.ask("serve", chunk=chunk, requests=[r | {"tokens": tokens} for r in sent])

  def _requests(self, case, seed):
    return figures.requests(case, self._config, OUTPUTS[self._model], self._vocab_size, seed)

  def _serve(self, name, case, requests):
    time.sleep(self._config.settle_s)
    chunk = case.chunk if case else 512
    return self._workers[name].ask("serve", chunk=chunk, requests=requests)["requests"]

  def _timed(self, case, number):
    """{engine: figures} of one case in one round, beside what the machine can do."""
    sent = self._requests(case, seed=1 + number)
    values = {}
    for name in self._engines(number):
      try:
        values[name] = figures.figures(case, self._serve(name, case, sent))
      except (worker.WorkerError, ValueError) as error:
        values[name] = {"error": str(error)}
        if not self._workers[name].alive:
          self._workers.pop(name)
          self._leave_out(name, error)
    if "error" not in values[US]:
      context = self._config.context + OUTPUTS[self._model] // 2
      values[US] |= limits.achieved(
        case, values[US], self._checkpoint.config, self._loaded[US], context
      )
    return values

  def _agreement(self, number):
    """{peer: first tokens that are ours}, for every prompt."""
    names, found = self._engines(number), {}
    if self._model != DEFAULT_MODEL:
      prompts = [figures.prompt((9, i), 24, self._vocab_size) for i in range(len(_TEXTS))]
    else:
      tokenizer = load_tokenizer(self._checkpoint.tokenizer_json, (), None)
      prompts = [tokenizer.encode(text, add_special_tokens=False) for text in _TEXTS]
    for name in names:
      ask = lambda prompt, name=name: self._serve(
        name, None, [{"prompt": prompt, "tokens": _AGREED, "after": 0}]
      )
      try:
        found[name] = [ask(prompt)[0]["tokens"] for prompt in prompts]
      except worker.WorkerError as error:
        self._workers.pop(name).close(at_once=True)
        self._leave_out(name, error)
    return {
      name: {"first_tokens": figures.agreement(found[US], tokens), "of": _AGREED}
      for name, tokens in found.items()
    }

  def _memory(self, number):
    return {name: {"peak_mb": self._workers[name].peak_mb()} for name in self._engines(number)}

  def _start_up(self, case):
    """{engine: seconds from nothing to the first token}, with and without what it compiled."""
    values = {}
    for name in list(self._directories):
      shutil.rmtree(self._caches / name / "start", ignore_errors=True)
      try:
        values[name] = {key: self._first_token(name, case) for key in ("cold_s", "warm_s")}
      except worker.WorkerError as error:
        values[name] = {"error": str(error)}
        self._leave_out(name, error)
    return values

  def _first_token(self, name, case):
    time.sleep(self._config.settle_s)
    sent = self._requests(case, seed=0)
    begin = time.perf_counter()
    process = self._spawn(name, "start")
    try:
      loaded = self._load(process, name, "start", only_chunk=True)
      process.ask("serve", chunk=case.chunk, requests=sent)
      self._loaded.setdefault(name, loaded)
      return time.perf_counter() - begin
    finally:
      process.close()


def brief(values):
  """Values of a row for the log."""
  shown = {
    name: {key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}
    for name, found in values.items()
  }
  return ", ".join(f"{name} {found}" for name, found in shown.items())
