"use strict";
// The page: sliders in, sentences, tables and a chart out. Every number is budget()'s, from arithmetic.py.

const GiB = 2 ** 30;
const twos = (from, to) => { const all = []; for (let n = from; n <= to; n *= 2) all.push(n); return all; };
const count = (n, none) => n === null ? none : n.toLocaleString("en-US");
const some = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;
const $ = (id) => document.getElementById(id);

// What can be set: the values a slider stops at, given the shape and what is set so far, and how one is said.
const SLIDERS = {
  n_kv: { label: "KV heads", stops: (c) => c.shape.latent ? [c.shape.n_kv] : divisors(c.shape.n_head).reverse(), say: (v, c) => c.shape.latent ? "a latent vector for all" : `${v} of ${c.shape.n_head}` },
  kv_dtype: { label: "KV precision", stops: (c) => c.shape.latent ? ["fp16", "fp8"] : ["fp16", "fp8", "int8", "int4", "int2"], say: (v) => `${BITS[v]} bits (${v})` },
  context: { label: "Context", stops: () => [...twos(128, 2 ** 20), ...twos(192, 2 ** 20)], most: 2 ** 24, say: (v) => some(v, "token") },
  batch: { label: "Batch", stops: () => twos(1, 1024), most: 65536, say: (v) => some(v, "conversation") },
  n_layer: { label: "Layers", stops: (c) => c.shape.latent ? [c.shape.n_layer] : Array.from({ length: 128 }, (_, i) => i + 1), most: 1024, say: String },
  head_dim: { label: "Numbers in a head", stops: (c) => c.shape.latent ? [c.shape.head_dim] : [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256], most: 4096, say: String },
  memory: { label: "Memory of a device", stops: () => [1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192, 288], most: 4096, say: (v) => `${v} GiB`, unit: "GiB" },
  tp: { label: "Devices sharing the heads", stops: (c) => divisors(c.shape.n_head).filter((tp) => tp <= 64 && shards(c.shape.n_head, c.n_kv, tp)), say: String },
  weight_dtype: { label: "Weight precision", stops: () => ["fp32", "fp16", "fp8"], say: (v) => `${BITS[v]} bits (${v})` },
  bandwidth: { label: "Memory bandwidth", stops: () => [10, 30, 50, 100, 200, 400, 600, 800, 1000, 1600, 2000, 3350, 4800, 8000], most: 1e5, say: (v) => `${count(v)} GB/s`, unit: "GB/s" },
};
const DEFAULTS = { kv_dtype: "fp16", batch: 1, memory: 24, tp: 1, weight_dtype: "fp16", bandwidth: 1000 };

const own = (shape) => ({ ...DEFAULTS, n_kv: shape.n_kv, n_layer: shape.n_layer, head_dim: shape.head_dim, context: shape.context });
let current = { name: "llama3-8b", shape: SHAPES["llama3-8b"], ...own(SHAPES["llama3-8b"]) };

/** The stops of a slider, in order, with the value that is set among them when it may be between two. */
function stops(key) {
  const slider = SLIDERS[key], all = slider.stops(current), value = current[key];
  if (all.includes(value)) return slider.most && all.length > 1 ? all.slice().sort((a, b) => a - b) : all;
  return slider.most ? [...all, value].sort((a, b) => a - b) : all;
}

/** A shape and a setting as arithmetic.py takes them. */
function setting(c) {
  const shape = resized(c.shape, c.n_layer, c.n_kv, c.head_dim);
  const s = { context: c.context, batch: c.batch, kv_dtype: c.kv_dtype, group: 32, residual: 32, weight_dtype: c.weight_dtype,
    memory: c.memory * GiB, bandwidth: c.bandwidth * 1e9, compute: 1, tp: c.tp, draft: null };
  return [shape, s];
}

// ---------------------------------------------------------------------------------------------------------------------
// The address holds the setting, under budget.py's names, so that it can be shared

function write_address() {
  const parts = [`shape=${current.name}`];
  for (const key in SLIDERS) if (current[key] !== own(current.shape)[key]) parts.push(`${key}=${current[key]}${SLIDERS[key].unit || ""}`);
  history.replaceState(null, "", `#${parts.join("&")}`);
  $("command").textContent = `python budget.py ${parts.join(" ")}`;
}

/** Take the address's setting over; what is not possible is left at the model's own, and said. */
function read_address() {
  const wrong = [];
  let address = location.hash.slice(1);
  try { address = decodeURIComponent(address); } catch { wrong.push(`${address} cannot be read`); address = ""; }
  const given = new Map(address.split("&").filter(Boolean).map((p) => {
    const at = p.indexOf("=");
    return at < 0 ? [p, ""] : [p.slice(0, at), p.slice(at + 1)];
  }));
  const name = given.get("shape") ?? "llama3-8b";
  if (!Object.hasOwn(SHAPES, name)) wrong.push(`shape=${name} is unknown`);
  const shape = SHAPES[Object.hasOwn(SHAPES, name) ? name : "llama3-8b"];
  current = { name: shape.name, shape, ...own(shape) };
  given.delete("shape");
  for (const key in SLIDERS) {  // in this order: which numbers of devices are possible depends on the KV heads
    if (!given.has(key)) continue;
    const slider = SLIDERS[key], [, digits, unit] = given.get(key).match(/^([0-9.]+)(\D*)$/) ?? [];
    const value = typeof current[key] === "string" ? given.get(key) : unit === (slider.unit || "") ? Number(digits) : NaN;
    const between = slider.most && slider.stops(current).length > 1 && (slider.unit || Number.isInteger(value)) && value >= 1 && value <= slider.most;
    if (between || slider.stops(current).includes(value)) current[key] = value;
    else wrong.push(`${key}=${given.get(key)} is not possible here`);
    given.delete(key);
  }
  for (const key of given.keys()) wrong.push(`${key} is unknown`);
  $("note").hidden = wrong.length === 0;
  $("note").textContent = wrong.length ? `${wrong.join(", ")}: left as it is by itself.` : "";
}

// ---------------------------------------------------------------------------------------------------------------------
// What is shown

const kind = (shape, n_kv) => shape.latent ? "latent" : heads(n_kv, shape.n_head);

/** A number with its place in budget()'s answer, for whoever wants to check it. */
function number(path, text) {
  const b = document.createElement("b");
  b.dataset.of = path;
  b.textContent = text;
  return b;
}

function table(id, header, rows) {
  const line = (cells, tag, mine) => {
    const tr = document.createElement("tr");
    cells.forEach((cell, i) => {
      const td = document.createElement(i === 0 ? "th" : tag);
      if (td.tagName === "TH") td.scope = tag === "th" ? "col" : "row";
      td.textContent = cell;
      tr.append(td);
    });
    if (mine) tr.className = "own";
    return tr;
  };
  $(id).tHead.replaceChildren(line(header, "th", false));
  $(id).tBodies[0].replaceChildren(...rows.map(([mine, ...cells]) => line(cells, "td", mine)));
}

function show() {
  const [shape, s] = setting(current), all = budget(shape, s), b = all.own, context = some(s.context, "token");
  const device = s.tp > 1 ? "On each device, one" : "One", many = s.batch === 1 ? "one conversation" : some(s.batch, "conversation");
  const memory = `${current.memory}\u00a0GiB`;
  const fits = b.free_bytes < 0 ? [`; but the weights alone need more than the ${memory}.`] : ["; ", number("conversations_fit", count(b.conversations_fit)), ` ${b.conversations_fit === 1 ? "fits" : "fit"} beside the weights in ${memory}.`];
  $("headline").replaceChildren(`${device} conversation of ${context} takes `, number("conversation_bytes", readable(b.conversation_bytes)), ...fits);

  const sentences = [
    ["Each further token takes ", number("bytes_per_token", readable(b.bytes_per_token)), b.bytes_per_token === 0 ? " more: every window is full." : " more in each conversation."],
    [s.batch === 1 ? "The cache of one conversation takes " : `The caches of ${many} take `, number("cache_bytes", readable(b.cache_bytes)),
      ...(s.tp > 1 ? [" on each device, ", number("cache_bytes_all_devices", readable(b.cache_bytes_all_devices)), ` on all ${s.tp}`] : []),
      b.fits ? "." : b.free_bytes < 0 ? "; there is no room for it." : ", more than there is room for: the speed below is what more memory would allow."],
    ["The weights take ", number("weight_bytes", readable(b.weight_bytes)), s.tp > 1 ? " on each device" : "", "; beside them ", b.free_bytes < 0 ? "nothing fits." : b.tokens_fit === null ? "any number of tokens fits, since every layer has a window." : number("tokens_fit", count(b.tokens_fit)), b.free_bytes >= 0 && b.tokens_fit !== null ? " tokens fit." : ""],
    ["A decoding step reads more of the ", number("larger", b.larger), ": the cache leads ",
      ...(b.crossover_tokens === null ? [number("crossover_tokens", "at no length")] : ["from ", number("crossover_tokens", count(b.crossover_tokens)), " tokens on"]), ` with ${many}, `,
      ...(b.crossover_batch === null ? [number("crossover_batch", "with no number"), " of them"] : ["or from ", number("crossover_batch", count(b.crossover_batch)), " conversations on"]), ` of ${context}.`],
    ["It takes at least ", number("floor_seconds", readable_seconds(b.floor_seconds)), ` at ${count(current.bandwidth)} GB/s: at most `, number("tokens_per_second", b.tokens_per_second.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 })), " tokens/s."],
  ];
  if (s.tp > 1 && !shape.latent && s.tp > shape.n_kv) sentences.push([`${s.tp} devices share ${some(shape.n_kv, "KV head")}: each is held ${s.tp / shape.n_kv} times, and fewer heads would save nothing more.`]);
  if (shape.latent && s.tp > 1) sentences.push(["The latent vector serves all heads, so every device holds all of it."]);
  if (shape.windowed) sentences.push([`${shape.windowed === shape.n_layer ? "All" : shape.windowed} of the layers hold no more than the newest ${count(shape.window)} tokens.`]);
  if (s.context > shape.context) sentences.push([`${context} are more than the ${count(shape.context)} this model was made for.`]);
  $("sentences").replaceChildren(...sentences.map((parts) => { const li = document.createElement("li"); li.append(...parts); return li; }));

  table("dial", ["", "KV heads", "cache", "weights", "tokens fit", "conversations fit", "floor of a step"],
    all.heads.map((r) => [r.n_kv === shape.n_kv, kind(shape, r.n_kv), r.n_kv, readable(r.cache_bytes), readable(r.weight_bytes), count(r.tokens_fit, "no limit"), count(r.conversations_fit), readable_seconds(r.floor_seconds)]));
  table("precision", ["", "cache", "bits a value"],
    all.precision.map((r) => [r.kv_dtype === s.kv_dtype, r.kv_dtype, readable(r.cache_bytes), rounded(r.bits_per_value, 2)]));
  const tps = [...new Set(all.parallel.flatMap((r) => r.devices.map((d) => d.tp)))].sort((a, b) => a - b);
  table("parallel", ["devices", ...tps], all.parallel.map((r) => [r.n_kv === shape.n_kv, kind(shape, r.n_kv), ...tps.map((tp) => {
    const d = r.devices.find((d) => d.tp === tp);
    return d ? `${readable(d.each)} / ${readable(d.total)}`.replace(/(\d) /g, "$1\u00a0") : "–";
  })]));
  draw(shape, s, b);
}

/** Total KV against context: MHA dashed, this setting solid, MQA dotted, what is left beside the weights as a line. */
function draw(shape, s, b) {
  const css = getComputedStyle(document.documentElement), color = (name) => css.getPropertyValue(`--${name}`).trim();
  const first = Math.min(128, s.context), last = Math.max(2 ** 20, s.context);
  const contexts = [...new Set([...twos(first, last), ...twos(1.5 * 128, last), s.context, last])].sort((x, y) => x - y);
  const line = (name, of, hue, dash, width) => {
    const bytes = contexts.map((t) => cache_nbytes(of, s, t, s.batch));
    return { name, x: contexts, y: bytes.map((n) => n / GiB), text: bytes.map(readable), mode: "lines", line: { color: color(hue), dash, width },
      hovertemplate: `${name}: %{text} at %{x:,} tokens<extra></extra>` };
  };
  const other = (n_kv) => resized(shape, shape.n_layer, n_kv, shape.head_dim);
  const ends = shape.latent ? [line("uncompressed", having(shape, "latent", null), "mha", "dash", 2)] : [line("MHA", other(shape.n_head), "mha", "dash", 2), line("MQA", other(1), "mqa", "dot", 2.5)];
  const mine = line(shape.latent ? "latent" : `this: ${kind(shape, shape.n_kv)}`, shape, "own", "solid", 3.5);
  const lines = [...ends, { ...mine, legendrank: 1 }];  // drawn last, so that it is seen where it equals another
  const free = b.free_bytes / GiB, all = [...lines.flatMap((l) => l.y), ...(free > 0 ? [free] : [])];
  const low = Math.floor(Math.log10(Math.min(...all))), high = Math.ceil(Math.log10(1.5 * Math.max(...all)));
  const marker = { name: "now", x: [s.context], y: [b.cache_bytes / GiB], text: [readable(b.cache_bytes)], mode: "markers", showlegend: false,
    marker: { size: 13, color: color("own"), line: { color: color("paper"), width: 2 } }, hovertemplate: "now: %{text} at %{x:,} tokens<extra></extra>" };
  const small = $("chart").clientWidth < 500;
  const left = b.free_bytes < 0 ? "" : `${readable(b.free_bytes)} left beside the weights`;
  const decades = Array.from({ length: high - low + 1 }, (_, i) => low + i);
  const tokens = twos(first < 128 ? 1 : 128, last).filter((_, i) => i % (small ? 3 : 2) === 1);
  const layout = {
    margin: { l: 62, r: 12, t: 34, b: 48 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: color("ink"), size: 13, family: "system-ui, sans-serif" },
    xaxis: { type: "log", title: { text: "context, tokens" }, range: [Math.log10(first), Math.log10(last)], tickvals: tokens, ticktext: tokens.map((t) => t >= 2 ** 20 ? `${t / 2 ** 20}M` : t >= 1024 ? `${t / 1024}k` : t), gridcolor: color("line"), fixedrange: true, zeroline: false },
    yaxis: { type: "log", title: { text: s.tp > 1 ? "GiB on each device" : "KV cache, GiB" }, range: [low, high], tickvals: decades.map((d) => 10 ** d), ticktext: decades.map((d) => d < 0 ? (10 ** d).toFixed(-d) : (10 ** d).toLocaleString("en-US")), gridcolor: color("line"), fixedrange: true, zeroline: false, automargin: true },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", bgcolor: "transparent" }, hovermode: "closest",
    shapes: [{ type: "line", x0: s.context, x1: s.context, y0: 0, y1: 1, yref: "paper", line: { color: color("faint"), width: 1, dash: "dot" } },
      ...(free > 0 ? [{ type: "line", x0: 0, x1: 1, xref: "paper", y0: free, y1: free, line: { color: color("budget"), width: 2 } }] : [])],
    annotations: free > 0 ? [{ x: 0, xref: "paper", xanchor: "left", y: Math.log10(free), yanchor: free > 10 ** (high - 1) ? "top" : "bottom", text: left, showarrow: false, font: { color: color("budget") } }] : [],
  };
  Plotly.react("chart", [...lines, marker], layout, { displayModeBar: false, responsive: true });
  $("caption").textContent = free > 0 ? "The horizontal line is the memory that the weights leave." : "The weights alone need more than the memory: there is no room for any cache.";
  $("chart").setAttribute("aria-label", `Chart of the KV cache in GiB against the context, both on logarithmic axes. At ${count(s.context)} tokens this setting holds ${readable(b.cache_bytes)}. ${$("caption").textContent}`);
}

// ---------------------------------------------------------------------------------------------------------------------
// Controls

for (const name in SHAPES) $("shape").add(new Option(name, name));
for (const key in SLIDERS) {
  const p = document.createElement("p");
  p.className = "control";
  p.innerHTML = `<label for="${key}">${SLIDERS[key].label} <output id="${key}-says" for="${key}"></output></label><input type="range" id="${key}" min="0" step="1">`;
  $("sliders").append(p);
  $(key).addEventListener("input", () => {
    current[key] = stops(key)[$(key).valueAsNumber];
    $("note").hidden = true;
    if (!SLIDERS.tp.stops(current).includes(current.tp)) current.tp = Math.max(...SLIDERS.tp.stops(current).filter((tp) => tp < current.tp));
    update();
  });
}

function update() {
  $("shape").value = current.name;
  for (const key in SLIDERS) {
    const all = stops(key), slider = $(key), said = SLIDERS[key].say(current[key], current);
    slider.max = all.length - 1;
    slider.valueAsNumber = all.indexOf(current[key]);
    slider.disabled = all.length === 1;
    slider.setAttribute("aria-valuetext", said);
    $(`${key}-says`).textContent = said;
  }
  write_address();
  show();
}

$("shape").addEventListener("change", () => {
  const shape = SHAPES[$("shape").value], { memory, bandwidth, weight_dtype } = current;  // the device stays the same
  current = { name: shape.name, shape, ...own(shape), memory, bandwidth, weight_dtype };
  $("note").hidden = true;
  update();
});
$("reset").addEventListener("click", () => { current = { name: current.name, shape: current.shape, ...own(current.shape) }; $("note").hidden = true; update(); });
$("share").addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(location.href); $("share").textContent = "Copied"; }
  catch { $("share").textContent = "The address bar has it"; }
  setTimeout(() => { $("share").textContent = "Copy a link to this"; }, 2000);
});
window.addEventListener("hashchange", () => { read_address(); update(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
read_address();
update();
