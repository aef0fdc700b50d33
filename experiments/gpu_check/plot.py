"""Pictures of the results, as PNG and SVG, where matplotlib is installed."""


def draw(settings, records, folder):
  """Draws what there is.

  Returns:
    a line that says what was written, or why nothing was.
  """
  try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
  except ImportError:
    return "no plots: matplotlib is not installed"
  written = []
  for name, picture in (("decode", _decode), ("prefill", _prefill), ("serving", _serving)):
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    if picture(axes, settings, records):
      for kind in ("png", "svg"):
        figure.savefig(folder / f"{name}.{kind}", dpi=120)
      written.append(name)
    plt.close(figure)
  return f"plots of {', '.join(written) or 'nothing'} in {folder}"


def _series(axes, points, label, marker):
  points = sorted(points)
  if points:
    axes.plot(*zip(*points, strict=True), label=label, marker=marker)


def _decode(axes, settings, records):
  mine, torch, cudnn = (records.values(stage) for stage in ("decode", "torch", "cudnn"))
  for batch in sorted({b for b, _ in settings.decodes}):
    for found, word, marker in (
      (mine, _name(mine), "o"),
      (torch, "SDPA", "x"),
      (cudnn, "cuDNN", "+"),
    ):
      points = [(v["context"], v["gb_per_s"]) for v in found.values() if v.get("batch") == batch]
      _series(axes, points, f"{word}, batch {batch}", marker)
  copied = records.values("machine").get("copy")
  if copied:
    axes.axhline(copied["bytes_per_s"] / 1e9, color="black", linestyle="--", label="copy")
  axes.set(xscale="log", xlabel="context (tokens)", ylabel="GB/s of keys and values",
           title="Decode attention", ylim=(0, None))  # fmt: skip
  return _finish(axes, mine)


def _name(found):
  return next((v["implementation"] for v in found.values()), "")


def _prefill(axes, settings, records):
  mine, torch = records.values("prefill"), records.values("torch")
  for prefix in sorted({p for _, p in settings.chunks}):
    for found, word, marker in ((mine, _name(mine), "o"), (torch, "SDPA", "x")):
      points = [
        (v["tokens"], v["tflop_per_s"]) for v in found.values() if v.get("prefix") == prefix
      ]
      _series(axes, points, f"{word}, prefix {prefix:,}", marker)
  product = records.values("machine").get("matmul")
  if product:
    axes.axhline(product["flops"] / 1e12, color="black", linestyle="--", label="matmul")
  axes.set(xscale="log", xlabel="tokens of the chunk", ylabel="TFLOP/s of causal attention",
           title="Chunk attention", ylim=(0, None))  # fmt: skip
  return _finish(axes, mine)


def _serving(axes, settings, records):
  found = records.values("serving")
  for case, value in found.items():
    steps = value["steps"]
    ends = [s["prefix"] + s["chunk"] for s in steps]
    (line,) = axes.plot(ends, [s["ms"] for s in steps], marker=".", label=case)
    axes.plot(ends, [s["predicted_ms"] for s in steps], linestyle=":", color=line.get_color())
  axes.set(
    yscale="log", xlabel="tokens of the prompt computed", ylabel="ms of a step (dotted: predicted)",
    title=f"{settings.decoders} decoders and a prompt of {settings.prompt:,}",
  )  # fmt: skip
  return _finish(axes, found)


def _finish(axes, found):
  if found:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
  return bool(found)
