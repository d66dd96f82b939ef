"""
How bench.py talks to what it measures: a process of its own for each, in whatever environment it needs, one line of JSON
for a question and one for the answer. So peers take turns within one run, and none imports another's libraries.

A question: {"dialect": "llama", "n_kv": 8, "batch": 32, "context": 2000, "steps": 16, "dtype": "float32", "threads": 2}.
Its answer: {"steps_s": [...]}: seconds of each decoding step of the whole batch, the last of which reads `context` tokens;
or {"skip": "why"}. Before the first question a peer says who it is.
"""

import json
import os
import sys

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # from here on, whatever libraries print on stdout is no answer: import this before them


def serve(peer, how, measure):
    """Answer questions with measure(question) until there are no more."""
    print(json.dumps({"peer": peer, "how": how}), file=ANSWERS)
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except Exception as error:
            answer = {"skip": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=ANSWERS)
