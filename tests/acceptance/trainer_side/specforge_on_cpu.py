"""Run by the trainers' Python in place of `specforge`, whose arguments it takes: the same on a CPU.

EAGLE-3's loss is a Triton kernel, so the formula stands in for it. Losses go to the file that $LOSSES names, one a
line.
"""

import json
import os
import sys
from pathlib import Path

import specforge.algorithms.eagle3.model as eagle3
from specforge.cli import main
from specforge.training.strategies.base import DFlashTrainStrategy, DSparkTrainStrategy, Eagle3TrainStrategy


class Loss:
    """specforge.core.loss.LogSoftmaxLoss in plain torch."""

    @staticmethod
    def apply(logits, target, mask):
        return -(mask.squeeze(-1) * (target * logits.float().log_softmax(-1)).sum(-1)).mean()


def told(forward_loss):
    def wrapped(self, *args, **kwargs):
        out = forward_loss(self, *args, **kwargs)
        with Path(os.environ["LOSSES"]).open("a") as file:
            file.write(json.dumps(out.loss.item()) + "\n")
        return out

    return wrapped


eagle3.LogSoftmaxLoss = Loss
for strategy in (Eagle3TrainStrategy, DFlashTrainStrategy, DSparkTrainStrategy):
    strategy.forward_loss = told(strategy.forward_loss)
os.environ["SPECFORGE_DEVICE"] = "cpu"
sys.exit(main())
