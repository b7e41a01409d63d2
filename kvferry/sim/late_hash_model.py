"""A ``HashModel`` that computes as late as a device may: when its result is read, after the launch of the next step.

Anything that may go wrong with a step that runs while the next one is scheduled goes wrong here every time: loads of the next
step write first, and freed blocks have new owners.
"""

from __future__ import annotations

from collections.abc import Callable

from core.request import ModelRunnerOutput, SchedulerOutput
from core.testing.hash_model import HashModel


class LateHashModel(HashModel):
    """Begins a connector's step at the launch; computes it, and ends the connector's, when the result is read."""

    def launch_model(self, scheduler_output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See ``HashModel.launch_model``."""
        self._start_connector_step(scheduler_output)
        self.encoder.start_step(scheduler_output)
        self._update_batch(scheduler_output)
        work = [
            (request_id, self._batch[request_id], self._batch[request_id].num_computed_tokens, num_tokens)
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
        ]
        output = ModelRunnerOutput()

        def compute() -> ModelRunnerOutput:
            for request_id, row, start, num_tokens in work:
                token_id = self._compute(request_id, row, start, num_tokens)
                if token_id is not None:
                    output.sampled_token_ids[request_id] = [token_id]
            output.kv_connector_output = self._finish_connector_step(scheduler_output)
            output.ec_connector_output, output.failed_embeddings = self.encoder.finish_step(scheduler_output)
            return output

        return compute
