"""The line protocol of a worker: a JSON object a line in, one a line out. Standard library only.

  {"op": "load", "model": DIR, "options": {...}}     -> {"versions": {...}, ...}
  {"op": "serve", "chunk": 512, "requests": [...]}   -> {"requests": [...]}
  {"op": "quit"}

A request is {"prompt": ids, "tokens": count, "after": n}: it is submitted at once (n = 0), or when
each of those submitted at once has n outputs. A reply has, for each, `submitted_s`, `times_s` and
`tokens` of its outputs, in seconds since the first was submitted. `chunk` bounds the tokens of a
step; null: a step holds whole prompts. What fails is answered by {"error": text}.

An engine has `load(model, options)`, `set_chunk(chunk)`, `submit(key, prompt, tokens)` and
`step()`, which returns pairs of a key and a list of new tokens. Decoding is greedy and goes on past
the end of sequence.
"""

import json
import os
import sys
import time


def serve(engine, requests):
  """Runs requests to their end; see the module."""
  begin = time.perf_counter()
  found = [{"submitted_s": None, "times_s": [], "tokens": []} for _ in requests]

  def submit(number):
    found[number]["submitted_s"] = time.perf_counter() - begin
    engine.submit(number, requests[number]["prompt"], requests[number]["tokens"])

  first = [i for i, request in enumerate(requests) if not request.get("after")]
  later = [i for i, request in enumerate(requests) if request.get("after")]
  for number in first:
    submit(number)
  left = sum(request["tokens"] for request in requests)
  while left > 0:
    outputs = engine.step()
    now = time.perf_counter() - begin
    for number, tokens in outputs:
      found[number]["times_s"] += [now] * len(tokens)
      found[number]["tokens"] += tokens
      left -= len(tokens)
    started = min(len(found[i]["tokens"]) for i in first)
    due = [i for i in later if requests[i]["after"] <= started]
    for number in due:
      submit(number)
    later = [i for i in later if i not in due]
  return found


def answer(engine, message):
  """The reply to one message."""
  if message["op"] == "load":
    return engine.load(message["model"], message.get("options") or {})
  if message["op"] == "serve":
    engine.set_chunk(message.get("chunk"))
    return {"requests": serve(engine, message["requests"])}
  raise ValueError(f"op={message['op']!r}: use load, serve or quit")


def main(engine):
  """Answers until told to quit, or until stdin ends. Whatever libraries print goes to stderr."""
  out = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  for line in sys.stdin:
    message = json.loads(line)
    if message["op"] == "quit":
      break
    try:
      reply = answer(engine, message)
    except Exception as error:  # Whatever it is, the driver has to hear of it.
      reply = {"error": f"{type(error).__name__}: {error}"}
    out.write(json.dumps(reply) + "\n")
    out.flush()
  os._exit(0)  # Some libraries hang in their own clean-up.
