"""
What stands in for vLLM's Python in tests: `python -m vllm.entrypoints.openai.api_server …` and `python bench/vllm_load.py`,
as far as serve.py knows them. STUB says how it misbehaves.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STUB = os.environ.get("STUB", "")
option = {a: b for a, b in zip(sys.argv, sys.argv[1:], strict=False) if a.startswith("--")}

if sys.argv[1].endswith("vllm_load.py"):
    print(json.dumps({"peer": "vLLM", "how": "a stub"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)["arguments"]
        o = dict(zip(asked, asked[1:], strict=False))
        n, prompt, output = (int(o[f"--{x}"]) for x in ("num-prompts", "random-input-len", "random-output-len"))
        if "crawls" in STUB:
            time.sleep(1.5)
        if "gasps" in STUB and o["--num-prompts"] == "4":
            raise MemoryError("no more of it")
        answer = {f"{p}_{what}_ms": 10.0 * int(p[1:]) for what in ("ttft", "itl") for p in ("p50", "p95", "p99")}
        answer |= {"num_prompts": n, "failed": 1 if "fails" in STUB else 0, "output_throughput": 100.0 * n}
        answer |= {"total_input_tokens": n * prompt - ("shortens" in STUB), "total_output_tokens": n * output}
        print(json.dumps(answer), flush=True)
    sys.exit()

print("INFO a stub", flush=True)
if "starves" in STUB:
    print("(Worker pid=7) ERROR 11-30 19:50:30 [core.py:1510] ValueError: too little memory, please", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}", flush=True)
    sys.exit(1)
if "deaf" in STUB:  # and with a child that would outlive it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
if "hangs" in STUB:
    time.sleep(600)

model, memory = option["--model"], int(option["--kv-cache-memory-bytes"])
with open(os.path.join(model, "config.json")) as f:
    c = json.load(f)
block = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * 128 * 4
METRICS = f"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="128",cache_dtype="auto",num_cpu_blocks="None",num_gpu_blocks="{memory // block}"}} 1.0
"""


class Handler(BaseHTTPRequestHandler):
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.answer(METRICS if self.path == "/metrics" else "")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choices = []
        for i, tokens in enumerate(body["prompt"]):
            known = [None] + [{str(t): {"logprob": -0.5}} for t in tokens[1:]]
            choices.append({"index": i, "prompt_logprobs": known, "token_ids": [64]})
        self.answer(json.dumps({"choices": choices[::-1]}))

    def log_message(self, *args):
        pass


assert option["--host"] == "127.0.0.1" and re.fullmatch(r"\d+", option["--port"])
ThreadingHTTPServer(("127.0.0.1", int(option["--port"])), Handler).serve_forever()
