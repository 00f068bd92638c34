"""Stand-in for `sgl_kernel` on machines without a GPU: names to import, nothing to compute with.

PyPI's sglang-kernel is a CUDA build. SGLang's CPU path imports the functions below when it loads its modules (KV cache
moves and speculative decoding) and calls none of them in a plain prefill or decode on a CPU without AMX. Each raises,
so that a path which does need a kernel stops there. Any other name stays missing: SGLang asks
`hasattr(sgl_kernel, ...)`, and a catch-all would answer yes to everything.
"""

from collections.abc import Callable
from typing import NoReturn

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",  # 0.5.23
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: the CPU shim (deploy/cpu/shims) has no kernels; this needs a machine with a GPU"
        )

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


globals().update({name: _absent(name) for name in __all__})
