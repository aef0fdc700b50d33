"""What a long prompt does to streams that are decoding: the same load, chunked and unchunked."""

import dataclasses
import importlib.resources
import json
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve import sched
from jaxserve.engine import Engine
from jaxserve.engine.startup import Started
from jaxserve.pytree import scalar
from jaxserve.replay import recording, runner
from jaxserve.replay.recorder import Recorder
from jaxserve.replay.records import RunRecord, run_result
from jaxserve.replay.report import render_report
from jaxserve.replay.workload import LONG_QUESTION, Arrival, StallSizes, fitted, stall_workload
from jaxserve.text.chat import render_chat
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import SchedulerParams

_WARM_UP_STEPS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """Outcome of the experiment.

  Attributes:
    runs: chunked, then unchunked; or one for each policy compared.
    texts: replies of the first run, by request.
    document: what `result.json` and the last line of stdout hold.
    events: the recording of both runs, for `steps.jsonl`.
  """

  runs: Sequence[RunRecord]
  texts: Mapping[str, str]
  document: Mapping[str, Any]
  events: Sequence[recording.Event]


def long_text() -> str:
  """A real text of several thousand tokens: the opening of a novel in the public domain."""
  return importlib.resources.files("jaxserve.replay").joinpath("data/alice.txt").read_text()


def run_experiment(
  started: Started, tokenizer: Tokenizer, hardware: str, startup: Mapping[str, Any],
  sizes: StallSizes | None = None, compare: Sequence[str] = (),
  on_first_step: Callable[[], None] = lambda: None,
) -> Result:  # fmt: skip
  """Runs the load under the given budget, and again unchunked with a budget of max_model_len.

  Args:
    started: an idle engine whose bucket table covers both budgets.
    tokenizer: of its model.
    hardware: one line for the record.
    startup: seconds of each phase so far, and the number of buckets.
    sizes: shape of the load; None: the default, cut to what the engine can hold.
    compare: policies to run side by side instead of the two budgets.
    on_first_step: called when the first steps have run, before the rest of the warm-up.
  """
  engine, checkpoint = started.engine, started.checkpoint
  config = engine.config.scheduler
  sizes = fitted(sizes or StallSizes(), config.max_model_len, config.cache.num_slots)

  def encode_chat(question: str) -> list[int]:
    text = render_chat(checkpoint.chat_template, [{"role": "user", "content": question}])
    return tokenizer.encode(text, add_special_tokens=False)

  hello = encode_chat("Hello")
  runner.decode_step_seconds(engine, hello, rows=1, steps=3)
  on_first_step()
  engine.warm_up(max(int(engine.params.budget), sizes.whole_step))
  step_s = runner.decode_step_seconds(engine, hello, sizes.streams, _WARM_UP_STEPS)
  prompt = _long_prompt(tokenizer, encode_chat, sizes.long_prompt_tokens)
  arrivals = stall_workload(encode_chat, prompt, step_s, sizes)
  events: list[recording.Event] = []
  recorder = Recorder(engine, started.options.model, events.append)
  runs, outputs = _run_all(recorder, arrivals, compare)
  agreements = [runner.compare(outputs[0], other) for other in outputs[1:]]
  document = {
    "model": checkpoint.name,
    "hardware": hardware,
    "retraces": engine.retraces,
    "tokens_equal": all(agreement.equal for agreement in agreements),
    "near_ties": sum(agreement.near_ties for agreement in agreements),
    "startup": startup,
    "runs": [run_result(run) for run in runs],
  }
  texts = {name: tokenizer.decode([e.token for e in events]) for name, events in outputs[0].items()}
  return Result(runs=runs, texts=texts, document=document, events=events)


def write(result: Result, directory: pathlib.Path, title: str) -> None:
  """Writes report.html, result.json and steps.jsonl."""
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "report.html").write_text(render_report(title, result.runs, result.document))
  (directory / "result.json").write_text(json.dumps(result.document, indent=2) + "\n")
  lines = "".join(recording.to_line(event) for event in result.events)
  (directory / "steps.jsonl").write_text(lines, "utf-8")


def table(result: Result) -> str:
  """The runs side by side, for a terminal."""
  runs = result.document["runs"]
  keys = dict.fromkeys(key for run in runs for key in run if key != "name")
  rows = [(key, [_cell(run.get(key)) for run in runs]) for key in keys]
  rows.append(("retraces after sealing", [str(result.document["retraces"])] * len(runs)))
  names = [run["name"] for run in runs]
  widths = [max(len(n), *(len(cells[i]) for _, cells in rows)) for i, n in enumerate(names)]
  lines = [("", names), *rows]
  return "\n".join(
    f"{label:24}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True))
    for label, cells in lines
  )


def _cell(value: object) -> str:
  if isinstance(value, float):
    return f"{value:,.3f}" if abs(value) < 1 else f"{value:,.1f}"
  return "-" if value is None else str(value)


def settings(engine: Engine, compare: Sequence[str]) -> list[tuple[str, str, SchedulerParams]]:
  """(name, policy, parameters) of the runs of one experiment.

  Without `compare`: as configured, and unchunked with a budget of max_model_len. With it: each
  policy at the configured budget, or at max_model_len where it admits whole prompts only.
  """
  chosen, config = engine.params, engine.config.scheduler
  policy = str(config.policy)
  if not compare:
    name = f"chunked at {int(chosen.budget)}" if chosen.chunked_prefill else "as configured"
    hyper = {key: float(value) for key, value in chosen.policy.items()}
    whole = sched.make_params(
      config, budget=config.max_model_len, chunked_prefill=False, policy=hyper
    )
    return [(name, policy, chosen), ("unchunked", policy, whole)]
  runs = []
  for other in compare:
    whole_prompts = sched.find_policy(other).whole_prompts
    budget = config.max_model_len if whole_prompts else int(chosen.budget)
    params = dataclasses.replace(chosen, budget=scalar(budget, np.int32))
    if other != policy:
      defaults = sched.make_params(dataclasses.replace(config, policy=other)).policy
      params = dataclasses.replace(params, policy=defaults)
    runs.append((other, other, params))
  return runs


def _run_all(
  recorder: Recorder, arrivals: Sequence[Arrival], compare: Sequence[str]
) -> tuple[list[RunRecord], list[runner.Outputs]]:
  engine = recorder.engine
  chosen, policy = engine.params, engine.config.scheduler.policy
  runs, outputs = [], []
  for name, other, params in settings(engine, compare):
    logging.getLogger(__name__).info("Running %d requests, %s", len(arrivals), name)
    engine.set_policy(other, params)
    run, tokens = runner.run(recorder, arrivals, name, other)
    runs.append(run)
    outputs.append(tokens)
  engine.set_policy(policy, chosen)
  return runs, outputs


def _long_prompt(
  tokenizer: Tokenizer, encode_chat: Callable[[str], list[int]], length: int
) -> list[int]:
  """A chat prompt of exactly `length` tokens: a long text, cut, and a question about it."""
  text = tokenizer.encode(long_text(), add_special_tokens=False)
  frame = encode_chat(LONG_QUESTION)
  # The text goes where the question starts, so that the prompt stays a well-formed chat.
  question = tokenizer.encode(LONG_QUESTION, add_special_tokens=False)
  at = next(
    (i for i in range(len(frame)) if frame[i : i + len(question)] == question), len(frame) // 2
  )
  body = max(length - len(frame), 0)
  text = (text * (body // max(len(text), 1) + 1))[:body]
  return (frame[:at] + text + frame[at:])[:length]
