"""A worker extension that also watches what vLLM hands to the draft head; imported in vLLM's workers by name.

It shares nothing with the capture but the worker: rows are attributed by the attention metadata that the
proposer itself is given, and the states are those it is given.
"""

from collections import defaultdict

import torch

from jobs.verifier.capture import SAMPLE_KEY, CaptureExtension

EXTENSION = "serving_spy.SpyExtension"


class SpyExtension(CaptureExtension):
    def spy_open(self) -> None:
        """From the next step on remember, by sample and position, the features given to the proposer (a later row wins)."""
        runner, drafter = self.model_runner, self.model_runner.drafter
        propose, self._fed = drafter.propose, defaultdict(dict)

        def watching(*args, **given):
            starts = given["common_attn_metadata"].query_start_loc_cpu.tolist()
            positions, features = given["target_positions"].tolist(), given["target_hidden_states"].cpu()  # [N], [N, 3H]
            for index, request in enumerate(runner.input_batch.req_ids):
                sample = (runner.requests[request].sampling_params.extra_args or {}).get(SAMPLE_KEY)
                for row in range(starts[index], starts[index + 1]):
                    self._fed[sample][positions[row]] = features[row]
            return propose(*args, **given)

        drafter.propose = watching

    def spy_save(self, path: str) -> None:
        """Write {sample: {position: [3H]}} and forget it."""
        torch.save(dict(self._fed), path)
        self._fed.clear()

    def spy_counters(self) -> dict[str, int]:
        """vLLM's own count of what was compiled and recorded in this worker."""
        from vllm.compilation.counter import compilation_counter

        return {name: int(value) for name, value in vars(compilation_counter).items() if isinstance(value, int)}
