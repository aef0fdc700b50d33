// llama.cpp through node-llama-cpp, as a worker of the line protocol in protocol.py.
// Its own scheduler batches the sequences; a bound of a step is the batch size of a context.

import path from "node:path";
import readline from "node:readline";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const modules = process.env.PEER_MODULES;
const require = createRequire(path.join(modules, "index.js"));
const entry = path.join(modules, "node_modules", "node-llama-cpp", "dist", "index.js");
const {getLlama} = await import(pathToFileURL(entry).href);
const {version} = require("node-llama-cpp/package.json");

let model, context, options, chunk;

async function setChunk(wanted) {
  if (context && chunk === wanted)
    return;
  await context?.dispose();
  chunk = wanted;
  context = await model.createContext({
    sequences: options.max_num_seqs,
    contextSize: options.max_model_len,
    batchSize: wanted ?? options.max_model_len,
    threads: options.threads,
    flashAttention: true
  });
}

async function load(message) {
  options = message.options;
  const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
  model = await llama.loadModel({modelPath: path.join(message.model, "model.gguf")});
  await setChunk(options.chunk ?? null);
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
  await setChunk(message.chunk ?? null);
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
