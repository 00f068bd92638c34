"""What runs inside SGLang's scheduler processes. Five hooks around two anchors: who (ModelRunner.forward) and what
(LogitsProcessor.forward).

Except while the model is loaded, nothing raises here: an exception in a hook kills the scheduler, and SGLang then kills
the process that owns the engine. Faults become codes in the control file, and the rows fail.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ray_extract.capture import compat
from ray_extract.capture.arena import AttachedArena
from ray_extract.capture.boundaries import final_norm, set_boundaries
from ray_extract.capture.copier import TORCH_DTYPES, CudaCopier, open_copier
from ray_extract.capture.plugin import plugin_record, report_failure, write_json
from ray_extract.capture.writer import Fault, Work, Writer
from ray_extract.errors import CaptureRefused

logger = logging.getLogger(__name__)

# SGLang may add decode rows (mixed chunk) and alignment to a pass of chunked_prefill_size tokens.
_SLACK_TOKENS = 4096


class Hooks:
    """The state of one scheduler process.

    Args:
        folder: the arena's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arena = AttachedArena(folder)
        self._writer: Writer | None = None
        self._work: Work | None = None
        self._prenorm: torch.Tensor | None = None  # of the open pass, where the plan stores it

    def around_load_model(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Set what the model hands over and take memory, before the KV cache is sized. Raises, so that SGLang ends."""
        if runner.is_draft_worker:
            return original(runner, *args, **kwargs)
        try:
            place = compat.place(runner, self._arena.spec.ranks)
            # Before the weights, so that registering the arena with CUDA goes on beside their loading.
            tokens = (runner.server_args.chunked_prefill_size or 0) + _SLACK_TOKENS
            device = torch.device(runner.device, runner.gpu_id)
            copier = open_copier(self._arena, device, tokens, copies=place.rank == 0)
            result = original(runner, *args, **kwargs)
            boundaries = self._configure(runner)
            self._writer = Writer(self._arena, place.writer, copier, place.rank)
            record = {
                "writer": place.writer,
                "rank": place.rank,
                "pid": os.getpid(),
                "boundaries": list(boundaries),
                "dtype": self._arena.spec.dtype,
                "hidden": self._arena.spec.hidden,
                "model": type(runner.model).__name__,
            }
            self._announce({**record, "state": "loaded"})
            threading.Thread(target=self._report_ready, args=(copier, record), daemon=True).start()
        except BaseException as error:
            report_failure(self._folder, error)
            raise
        return result

    def _configure(self, runner: Any) -> tuple[int, ...]:
        spec = self._arena.spec
        if runner.dtype is not TORCH_DTYPES[spec.dtype]:
            raise CaptureRefused(f"the engine runs in {runner.dtype}, the plan stores {spec.dtype}; set model.dtype")
        if runner.model_config.hidden_size != spec.hidden:
            raise CaptureRefused(
                f"the engine's hidden size is {runner.model_config.hidden_size}, the plan's {spec.hidden}"
            )
        name = compat.logits_processor_overridden(runner.model)
        if name is not None:
            raise CaptureRefused(f"{type(runner.model).__name__}: its {name} overrides LogitsProcessor.forward")
        layers = int(runner.model_config.num_hidden_layers)
        below = tuple(b for b in spec.boundaries if b < layers)
        if below and (name := compat.miscaptured(runner.model)) is not None:
            raise CaptureRefused(
                f"{type(runner.model).__name__}: in this SGLang its {name} hands over something else than boundaries "
                f"{list(below)}; leave them out"
            )
        got = set_boundaries(runner.model, below)
        if below == spec.boundaries:
            return got
        final_norm(runner.model).register_forward_hook(self.after_final_norm)
        return (*got, layers)

    def _report_ready(self, copier: Any, record: dict[str, Any]) -> None:
        try:
            timing = copier.ready() if isinstance(copier, CudaCopier) else {}
            if timing:
                logger.info("ray_extract: arena registered with CUDA: %s", timing)
            self._announce({**record, **timing, "state": "ready"})
        except Exception as error:
            report_failure(self._folder, error)

    def _announce(self, record: dict[str, Any]) -> None:
        write_json(self._folder / plugin_record(record["writer"], record["rank"]), record)

    def after_init_new(self, result: Any, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Compare the ids of new requests with the images'."""
        if self._writer is None:
            return
        for request in getattr(batch, "reqs", None) or ():
            rid = getattr(request, "rid", "")
            try:
                self._writer.check_request(rid, request.origin_input_ids)
            except Exception:
                logger.exception("ray_extract: checking request %s failed", rid)
                self._fail([rid])

    def _fail(self, rids: Sequence[str]) -> None:
        """Fail rows after an exception of ours, which was logged."""
        assert self._writer is not None
        try:
            self._writer.fail(rids, Fault.HOOK_FAILED)
        except Exception:
            # Without their states or their ids they fail all the same, only with another reason.
            logger.exception("ray_extract: failing %s failed", list(rids))

    def around_forward(
        self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Open a pass from the batch as the scheduler made it: later copies of it lose the request ids."""
        if self._writer is None or runner.is_draft_worker or self._work is not None:
            return original(runner, forward_batch, *args, **kwargs)
        self._prenorm = None
        work = self._work = self._open(forward_batch)
        if work is None:
            return original(runner, forward_batch, *args, **kwargs)
        try:
            output = original(runner, forward_batch, *args, **kwargs)
        except BaseException:
            self._writer.publish(work)
            raise
        finally:
            self._work = None
        try:
            output.logits_output.ray_extract_work = work
        except AttributeError:
            # Nothing that could carry it to the scheduler: published here, which waits for the copies.
            self._writer.publish(work)
        return output

    def _open(self, forward_batch: Any) -> Work | None:
        assert self._writer is not None
        try:
            if not compat.is_capture_mode(forward_batch) or not forward_batch.rids:
                return None
            return self._writer.begin(
                forward_batch.rids,
                [int(n) for n in forward_batch.extend_prefix_lens_cpu],
                [int(n) for n in forward_batch.extend_seq_lens_cpu],
            )
        except Exception:
            logger.exception("ray_extract: a forward pass could not be opened; its rows fail")
            self._fail(getattr(forward_batch, "rids", None) or ())
            return None

    def after_final_norm(self, norm: Any, args: tuple[Any, ...], output: Any) -> None:
        """Keep what the final norm read: with a residual given, the sum that it made of both.

        SGLang's norms return (normed, sum) then, on CUDA in place of their arguments (0.5.16 and 0.5.20
        `layers/layernorm.py`); alone, the argument stays as it was.
        """
        if self._work is not None:
            self._prenorm = output[1] if isinstance(output, tuple) else args[0]

    def around_logits(
        self,
        original: Callable[..., Any],
        processor: Any,
        input_ids: Any,
        hidden_states: Any,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Start copying the states of the open pass, if there is one."""
        if self._work is not None and self._work.ticket is None and not self._work.closed:
            assert self._writer is not None
            try:
                # multimodal classes embed the prompt themselves and call their language model without ids
                ids = logits_metadata.input_ids if input_ids is None else input_ids
                self._writer.issue(self._work, ids, self._states(hidden_states, aux_hidden_states))
            except Exception:
                logger.exception("ray_extract: taking the states of a forward pass failed")
        return original(
            processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *args, **kwargs
        )

    def _states(self, final: torch.Tensor, aux: Any) -> list[torch.Tensor]:
        """The states in the order of the spec; `aux` is a list of [T, H], or from 0.5.18 on one packed [T, K*H]."""
        spec = self._arena.spec
        if isinstance(aux, torch.Tensor):
            states = list(torch.split(aux, spec.hidden, dim=-1))
        else:
            states = list(aux or ())
        if self._prenorm is not None:
            states.append(self._prenorm)
            self._prenorm = None
        return [*states, final] if spec.final else states

    def before_process_batch_result(self, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        """Publish what the pass captured; the response is sent by the method that this precedes."""
        work = getattr(getattr(result, "logits_output", None), "ray_extract_work", None)
        if work is None or self._writer is None:
            return
        try:
            self._writer.publish(work)
        except Exception:
            logger.exception("ray_extract: publishing a forward pass failed")
