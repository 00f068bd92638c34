"""A plugin of SGLang for a test: layers leave the all-reduce of their output to the next one, on the CPU too.

SGLang does that where the fused kernel of flashinfer is to be used: on Hopper and later, in passes of at most 2,048
tokens. Only that decision is replaced; what follows from it is SGLang's own.
"""

from typing import Any


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.layers.communicator.LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer"
    HookRegistry.register(target, _decide, HookType.AROUND)


def _decide(original: Any, communicator: Any, *args: Any) -> bool:
    return not communicator.is_last_layer
