"""`DeepseekV2Model.forward` of vLLM 0.16.0 with auxiliary hidden states among its outputs.

The states are outputs and not hooks because hooks do not run in a compiled graph. This is the
upstream function with the five lines that 0.18 has too (vllm-project/vllm, models/deepseek_v2.py);
it stands in a module of its own, importing vLLM at the top, because torch.compile's ahead-of-time
cache resolves the function's globals from its module. Import it only where the model is loaded.

Tap ids are EAGLE-3's: id i is the residual stream at the INPUT of decoder layer i, so 0 is the
embedding, L (the number of layers) the output of the last layer before the final norm.
"""

from itertools import islice

import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.models.deepseek_v2 import _get_llama_4_scaling
from vllm.sequence import IntermediateTensors


def forward(
    self,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    intermediate_tensors: IntermediateTensors | None,
    inputs_embeds: torch.Tensor | None = None,
) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states after the final norm [N, H], with taps set also one [N, H] a tap, ascending."""
    if get_pp_group().is_first_rank:
        hidden_states = inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)  # [N, H]
        residual = None
    else:
        assert intermediate_tensors is not None
        hidden_states = intermediate_tensors["hidden_states"]
        residual = intermediate_tensors["residual"]

    llama_4_scaling_config = getattr(self.config, "llama_4_scaling", None)
    llama_4_scaling = None
    if llama_4_scaling_config is not None:
        llama_4_scaling = _get_llama_4_scaling(
            original_max_position_embeddings=llama_4_scaling_config["original_max_position_embeddings"],
            scaling_beta=llama_4_scaling_config["beta"],
            positions=positions,
        )

    taps = self.aux_hidden_state_layers
    aux_hidden_states = []  # [N, H] each
    for index, layer in enumerate(islice(self.layers, self.start_layer, self.end_layer), self.start_layer):
        if index in taps:
            # At layer 0 the stream still is the embedding, which may be the runner's own input buffer.
            aux_hidden_states.append(hidden_states.clone() if residual is None else hidden_states + residual)
        hidden_states, residual = layer(positions, hidden_states, residual, llama_4_scaling)

    if not get_pp_group().is_last_rank:
        return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})

    if self.end_layer in taps:
        aux_hidden_states.append(hidden_states + residual)
    hidden_states, _ = self.norm(hidden_states, residual)
    if aux_hidden_states:
        return hidden_states, aux_hidden_states
    return hidden_states
