"""`vllm bench serve` in a process that stays: each line of standard input is one run (a JSON list of its options),
answered by a line on standard output.

Its imports take ten seconds and are made while the server loads; a run of a few requests takes one.
"""

import json
import os
import sys


def main() -> None:
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the benchmark prints its table
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        bench(parser.parse_args(json.loads(line)))
        print("done", file=answers_to, flush=True)


if __name__ == "__main__":
    main()
