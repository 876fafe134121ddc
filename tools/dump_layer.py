"""Writes files for `gated-delta run` and `gated-delta check`; docs/files.md says what is in them.

From arrays, of NumPy or PyTorch (which bf16 takes):

    write("decode.safetensors", "gdn_decode", {"q": q, "k": k, …}, {"o": o, "state": states_after}, state_layout="v_last")

From a layer's projection to what leaves its norm, for one token:

    write("layer.safetensors", "gdn_decode", {"x": x, "conv_weight": weight, "conv_state": windows, "z": z, …},
          {"o": o, "state": states_after, "conv_state": windows_after}, heads=16, norm_eps=1e-6)

From a GDN layer of Hugging Face's Qwen3-Next or Qwen3.5, its next decode:

    record_decode(model.model.layers[0].linear_attn, "decode.safetensors")
    model.generate(…)
"""


def write(path, op, tensors, expected=None, **metadata):
    """Writes `tensors` by name, what is `expected` of the results by theirs, and metadata."""
    arrays = {name: _on_host(tensor) for name, tensor in tensors.items()}
    for name, tensor in (expected or {}).items():
        tensor = _on_host(tensor)
        arrays[f"expected.{name}"] = tensor.float() if hasattr(tensor, "float") else tensor.astype("float32")
    # True as "true", which is what the command reads.
    words = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in metadata.items()}
    if all(hasattr(array, "untyped_storage") for array in arrays.values()):
        from safetensors.torch import save_file
    else:
        from safetensors.numpy import save_file
    save_file(arrays, path, {"op": op, **words})


def record_decode(layer, path):
    """Has `layer` write its next decode: inputs with gates as given, and what it computes of them."""
    rule = layer.recurrent_gated_delta_rule

    def record(query, key, value, *, g, beta, initial_state, use_qk_l2norm_in_kernel=False, **others):
        layer.recurrent_gated_delta_rule = rule
        inputs = {"q": query, "k": key, "v": value, "g": g, "beta": beta, "state": initial_state}
        inputs = {name: _on_host(tensor) for name, tensor in inputs.items()}  # before the state is overwritten
        gates = dict(g=g, beta=beta, initial_state=initial_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        output, state = rule(query, key, value, **gates, **others)
        # That library's states are [B, HV, K, V], a slot for each sequence.
        options = dict(state_layout="v_last", qk_l2norm=use_qk_l2norm_in_kernel)
        write(path, "gdn_decode", inputs, {"o": output, "state": state}, **options)
        return output, state

    layer.recurrent_gated_delta_rule = record


def _on_host(tensor):
    """A copy without gaps, of an array or of a PyTorch tensor on any device."""
    if hasattr(tensor, "detach"):
        return tensor.detach().cpu().clone().contiguous()
    return tensor.copy(order="C")
