"""Run by the trainers' Python in place of `python -m MODULE ...`: the same on a CPU, for speculators' trainer.

Its trainer moves everything to accelerator 0. Losses of training steps go to the file that $LOSSES names, one a line.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    module = sys.argv.pop(1)
    if module.startswith("ray_extract"):
        from ray_extract.exporters.speculators_backend import register

        register()  # as the module does first; the imports below need it done
    import speculators.train.trainer as trainer
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.eagle3.core import Eagle3DraftModel

    def told(forward):
        def wrapped(self, *args, **kwargs):
            out = forward(self, *args, **kwargs)
            if self.training and torch.is_grad_enabled():
                with Path(os.environ["LOSSES"]).open("a") as file:
                    file.write(json.dumps(out[1].item()) + "\n")
            return out

        return wrapped

    def start(self, *args, **kwargs):
        started(self, *args, **kwargs)
        self.device_type = "cpu"

    started, trainer.Trainer.__init__ = trainer.Trainer.__init__, start
    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *args, **kwargs: None
    for model in (Eagle3DraftModel, DFlashDraftModel):
        model.forward = told(model.forward)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
