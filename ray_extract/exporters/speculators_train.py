"""speculators' trainer with the backend `ray_extract`: the arguments of `python -m speculators.train`, which it runs.

torchrun --nproc-per-node 8 -m ray_extract.exporters.speculators_train --hidden-states-backend ray_extract ...
"""

import runpy

from ray_extract.exporters.speculators_backend import register

if __name__ == "__main__":
    register()
    runpy.run_module("speculators.train", run_name="__main__")
