// llama.cpp through node-llama-cpp, as a worker of the line protocol in protocol.py.
// Its scheduler in JavaScript batches the sequences; the bound of a step is a context's batch size.

import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const home = path.join(process.env.PEER_MODULES, "node_modules", "node-llama-cpp");
const {getLlama} = await import(pathToFileURL(path.join(home, "dist", "index.js")).href);
const {version} = JSON.parse(fs.readFileSync(path.join(home, "package.json"), "utf8"));

let model, context, options;
let shape = "";

// Of a sequence each, the size of a context is the longest request; another shape takes another one.
async function setShape(chunk, requests) {
  const longest = Math.max(...requests.map((request) => request.prompt.length + request.tokens));
  const contextSize = Math.min(512 * Math.ceil(longest / 512 + 0.25), options.max_model_len);
  const wanted = JSON.stringify([chunk, requests.length, contextSize]);
  if (shape === wanted)
    return;
  await context?.dispose();
  context = await model.createContext({
    sequences: requests.length,
    contextSize,
    batchSize: chunk ?? options.max_model_len,
    threads: os.availableParallelism(),  // By default four, which spin, on two cores too.
    flashAttention: true
  });
  shape = wanted;
}

async function load(message) {
  options = message.options;
  const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
  model = await llama.loadModel({modelPath: path.join(message.model, "model.gguf")});
  return {versions: {"node-llama-cpp": version}};
}

async function generate(request, found, begin, onToken) {
  const sequence = context.getSequence();
  found.submitted_s = (performance.now() - begin) / 1e3;
  for await (const token of sequence.evaluate(request.prompt, {temperature: 0, yieldEogToken: true})) {
    found.times_s.push((performance.now() - begin) / 1e3);
    found.tokens.push(token);
    onToken();
    if (found.tokens.length === request.tokens)
      break;
  }
  await sequence.dispose();
}

async function serve(message) {
  await setShape(message.chunk, message.requests);
  const begin = performance.now();
  const found = message.requests.map(() => ({submitted_s: null, times_s: [], tokens: []}));
  const first = message.requests.flatMap((request, i) => request.after ? [] : [i]);
  const running = new Map();
  const start = (i) => running.set(i, generate(message.requests[i], found[i], begin, onToken));

  function onToken() {
    const least = Math.min(...first.map((i) => found[i].tokens.length));
    message.requests.forEach((request, i) => {
      if (request.after && request.after <= least && !running.has(i))
        start(i);
    });
  }

  first.forEach(start);
  for (let waited = 0; waited < running.size;) {
    waited = running.size;
    await Promise.all(running.values());
  }
  return {requests: found};
}

for await (const line of readline.createInterface({input: process.stdin})) {
  const message = JSON.parse(line);
  if (message.op === "quit")
    break;
  let reply;
  try {
    reply = message.op === "load" ? await load(message) : await serve(message);
  } catch (error) {
    reply = {error: String(error?.message ?? error)};
  }
  process.stdout.write(JSON.stringify(reply) + "\n");
}
process.exit(0);
