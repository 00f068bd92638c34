"""A plugin of SGLang for a test: what its attention on a CPU lacks for data-parallel attention, which pads batches.

Only the AMX backend says how long a padded request is (0.5.20 `layers/attention/intel_amx_backend.py`); this says the
same for the one that every CPU has.
"""


def register() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
