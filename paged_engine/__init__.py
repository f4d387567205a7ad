"""One model on one node: weights, models, paged KV pool, prefix cache, scheduler, sampler, step
loop.

Knows nothing of HTTP, text or other nodes. Called by node/engine_process.py.

Importing this package also makes `kernels` ours. Our folder `kernels/` has no `__init__.py`
(transformers would execute it, ARCHITECTURE.md), and a regular package of that name, such as
Hugging Face's, hides such a folder wherever it lies on the path. So our folder is added to the end
of the search path of whatever `kernels` is found: theirs stays whole for transformers, and
`kernels.paged_attention` is found as well.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from wire.errors import ConfigError

_REMEDY = "uninstall it (pip uninstall kernels), or install kvrelay into an environment of its own"


def _join_kernels(ours: Path) -> None:
    """Make the modules in our folder importable as `kernels.<module>`. Raises ConfigError with the
    remedy.
    """
    try:
        found = importlib.import_module("kernels")
    except Exception as why:  # another's package: its import may fail in any way
        raise ConfigError(
            f"another package named kernels is installed and cannot be imported ({why}); {_REMEDY}"
        ) from why
    if not hasattr(found, "__path__"):
        raise ConfigError(
            f"the file {found.__file__} hides kvrelay's folder kernels; rename it or start "
            f"elsewhere"
        )
    if str(ours) not in map(str, found.__path__):
        # A list and not an append: the path of a package without __init__ is computed anew when
        # sys.path changes.
        found.__path__ = [*found.__path__, str(ours)]
        importlib.invalidate_caches()
    for file in ours.glob("*.py"):
        spec = importlib.util.find_spec(f"kernels.{file.stem}")
        if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
            where = spec.origin if spec else None
            raise ConfigError(
                f"kernels.{file.stem} is {where} and not {file}: another package kernels hides "
                f"it; {_REMEDY}"
            )


_join_kernels(Path(__file__).resolve().parent.parent / "kernels")
