"""Speed of the GPU kernels: `python -m benchmarks.kernels [name ...]`, names as in
kernel_rows/.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from pathlib import Path

import torch


def main() -> None:
    rows = Path(__file__).parent / "kernel_rows"
    names = [module.name for module in pkgutil.iter_modules([str(rows)])]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=names, help=f"some of {', '.join(names)}")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in arguments.names:
        module = importlib.import_module(f"benchmarks.kernel_rows.{name}")
        for row in module.rows():
            print(row, flush=True)


if __name__ == "__main__":
    main()
